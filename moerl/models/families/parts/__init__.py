"""Parts that families are composed of: their form, rules of layers, fields of Megatron, checks of a config.json.

What only one family has is in its own file.
"""
