"""Weight pushes: from the trainer's ranks to rollout servers, with every installed byte verified.

Which rank sends what is in plan/, how bytes travel in transport/, what they are held to in verify/; when to push is publish.py's.
"""
