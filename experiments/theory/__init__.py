"""The limits of the papers, computed. One module per limit.

feature_learning: any smooth activation, finite depth (Bordelon et al., appendix D).
lazy: kernels of residual networks without feature learning (Bordelon et al., 4.3.1).
linear_joint: deep linear residual network with feature learning (Bordelon, 4.3.2).
linear_sgd: deep linear residual network under SGD (Tensor Programs VI, section 4).
plane: claims of stability, faithfulness and diversity over (α, γ) (TP-VI, section 7).
relu_mlp: first step of a plain ReLU network (Jelassi et al.).
"""
