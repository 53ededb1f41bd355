"""The terms that every room uses: leaves by path, the three functions, traced
programs."""
