"""Directories of Hugging Face: read and written."""
