"""Fused routers, which are not here: None is what Megatron takes for their absence (moe_router_fusion then says so)."""

fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
fused_topk_with_score_function = None
