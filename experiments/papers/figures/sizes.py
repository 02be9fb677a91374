"""Sizes of the figures' sweeps, as overrides of the packaged configs.

Those of the papers are as far as their texts tell them: of Megatron and the ViTs they
tell no widths.
"""

MLP = {"sweep.depths": "(8,32,128)"}
MLP_PAPER = {
    "data.image_size": "32",
    "model.width": "256",
    "sweep.widths": "(256,)",
    "sweep.depths": "(8,16,32,64,128,256,512,1024)",
    "sweep.seeds": "5",
    "steps": "39100",
    "sweep.average_last": "1000",
    "model.branch_multiplier": "2.0",
}
# As many layers as above.
TWO = {
    "model.block_depth": "2",
    "model.depth": "4",
    "sweep.depths": "(4,16,64)",
}
TWO_PAPER = MLP_PAPER | {"sweep.depths": "(4,8,16,32,64,128,256,512)"}
ABS = {"model.nonlinearity": "abs", "model.layer_norm": "True"}
A = {"sweep.axes.branch_multiplier": "2**[-2:2]"}

CNN_PAPER = {
    "data.image_size": "32",
    "batch_size": "64",
    "model.width": "64",
    "sweep.widths": "(64,128,256,512)",
    "sweep.depths": "(3,6,9,12,15,18,30)",
    "steps": "15640",
    "sweep.average_last": "782",
}
FLAT = {"sweep.widths": "(16,)"}
FLAT_PAPER = CNN_PAPER | {"model.width": "512", "sweep.widths": "(512,)"}
RESNET_PAPER = {
    "data.image_size": "32",
    "batch_size": "64",
    "model.blocks": "(2,2,2,2)",
    "model.width": "64",
    "model.depth": "1",
    "sweep.widths": "(64,)",
    "sweep.depths": "(1,2,4,8)",
    "steps": "15640",
    "sweep.average_last": "782",
}
VIT_PAPER = {
    "dataset": "tiny_imagenet",
    "batch_size": "64",
    "schedule.warmup": "1000",
    "model.width": "256",
    "model.depth": "3",
    "sweep.widths": "(256,)",
    "sweep.depths": "(3,6,9,12,15)",
    "steps": "31260",
    "sweep.average_last": "1563",
}
GPT_PAPER = {
    "data.context": "4096",
    "batch_size": "256",
    "model.head_dim": "64",
    "schedule.name": "cosine",
    "schedule.warmup": "500",
    "model.width": "1024",
    "model.depth": "4",
    "sweep.widths": "(1024,)",
    "sweep.depths": "(4,8,16,32)",
    "steps": "3900",
    "sweep.average_last": "100",
}
