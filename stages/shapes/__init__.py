"""The built-in example: a tiny Stable Diffusion 3 that draws one to three shapes, and a check of its pictures."""
