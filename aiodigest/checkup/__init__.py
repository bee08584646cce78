"""What is to be said of the servers of a namespace, and of what it holds there: ``DigestEngine.examine``."""
