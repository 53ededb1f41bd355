"""What families of models are made of."""
