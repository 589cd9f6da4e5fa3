"""Models beside the policy: critic, model of outcomes, teachers, each a train group.

Losses are in `algorithms` and `train/loss`, settings in `config/schema/companion_config.py`.
"""
