"""Images from texts: the parts as one model, its loss, and its sampling."""
