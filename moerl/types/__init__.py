"""Data that crosses processes, and errors: plain, picklable, without torch.

No behaviour lives here, and no settings (config/schema).
"""
