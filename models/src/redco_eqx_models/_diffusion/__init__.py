"""Building blocks of latent diffusion models."""
