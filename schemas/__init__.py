"""The drawing office: every word and number of a pipeline, without torch."""
