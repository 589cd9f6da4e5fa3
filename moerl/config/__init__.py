"""Settings of a run: reading them, explaining what is wrong with them. Imports no torch.

The settings are in schema/, their rules in rules/, what follows from them in derive/.
"""
