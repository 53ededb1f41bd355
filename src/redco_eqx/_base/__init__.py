"""The terms that every subpackage uses: leaves by path, the three functions, traced
programs."""
