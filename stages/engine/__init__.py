"""The engine: one transformer, sharded with FSDP2, its named weight sets, its optimizer and its checkpoints."""
