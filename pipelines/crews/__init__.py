"""Where ranks are: processes here, actors of Ray, workers that torchrun started. Each is a way to begin a Crew."""
