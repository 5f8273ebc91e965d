"""The shop floor: one file a stage, one folder a shelf of exchangeable parts."""
