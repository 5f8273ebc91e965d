"""What stages leave on disk: Arrow tables, pictures, tensors. Written whole or not at all, read with checks."""
