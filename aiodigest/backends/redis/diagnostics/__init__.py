"""The findings of ``doctor`` (``DigestEngine.examine``): facts that are asked for, and checks that judge them."""
