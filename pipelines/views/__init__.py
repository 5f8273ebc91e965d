"""A run as pictures: grids of samples, and the report."""
