"""A model folder's config, normalised; unknown features refused."""
