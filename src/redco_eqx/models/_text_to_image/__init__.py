"""Images from texts: the parts as one model, its loss, and how it is sampled."""
