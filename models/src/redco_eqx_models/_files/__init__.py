"""Reading and writing directories in the format of Hugging Face."""
