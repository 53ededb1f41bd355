"""What latent diffusion models are made of."""
