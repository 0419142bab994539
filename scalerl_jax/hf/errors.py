"""What is wrong with a checkpoint directory."""


class HfError(ValueError):
  """A checkpoint that cannot be used; the message is one line."""
