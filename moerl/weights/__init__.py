"""Moving weights from the trainer to the rollout servers, with every installed byte verified.

plan says who sends what to whom, deliveries in which buckets. Trainer ranks: send.WeightSender -> transport (ipc | nccl | disk) -> model
processes of servers: receive.WeightSession. The driver's sync.WeightSync leads all through one push, and canary.run_canary compares their
log-probs afterwards.
"""
