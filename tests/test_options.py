"""Wrong options of the zoo's models are named, with what they must be."""

import pytest
from test_families import abstract

ROW = (0, "inverted", 1, 3, 1, 6, 8)
# {model: (options, message)}. Each kind of value is checked in one place, `Options`.
WRONG = {
    "mlp": (
        ({"width": 0}, "width=0 must be a whole number, at least 1"),
        ({"base_width": 2.5}, "base_width=2.5 must be a whole number, at least 1 or N"),
        ({"nonlinearity": "rleu"}, "nonlinearity='rleu' must be one of relu, relu6"),
        ({"gain": 0.0}, "gain=0.0 must be a positive number or None"),
        ({"gain": float("inf")}, "gain=inf must be a positive number"),
        ({"input_shape": (8, 0)}, r"\(8, 0\) must be whole numbers, at least 1"),
        ({"bias": "yes"}, "bias='yes' must be True or False"),
        ({"dtype": "bf16"}, "dtype='bf16' must be a floating-point type"),
        ({"param_dtype": int}, "param_dtype=.* must be a floating-point"),
        ({"parametrization": "relu_mlpp"}, "relu_mlp"),
        ({"biases": True}, "'bias'"),
        # It has no branches.
        ({"branch_multiplier": 1.0}, "no option 'branch_multiplier'"),
    ),
    "resmlp": (
        ({"block_depth": 0}, "block_depth=0 must be a whole number, 1 to 1000"),
        ({"zero_init": True, "nonlinearity": "relu"}, "branches would never train"),
        ({"zero_init": True, "nonlinearity": "abs"}, "activation_first=True"),
        ({"branch_multiplier": -1.0}, "branch_multiplier=-1.0 must be a positive"),
        ({"remat": "some"}, "must be True or False or one of 'none', 'full', 'prod"),
    ),
    "cnn": (
        ({"width": 12}, "'stage1' is 0.125 times the width"),
        ({"input_shape": (7, 8, 1)}, "at least 8x8 pixels"),
        ({"pooling": "mean"}, "pooling='mean' must be one of 'average', 'max'"),
    ),
    "resnet18": (
        ({"blocks": (2, 0)}, r"blocks=\(2, 0\) must be whole numbers, at least 1"),
        ({"blocks": 3}, "blocks=3 must be whole numbers"),
        ({"input_shape": (8, 8)}, r"must be \(height, width, channels\), each at"),
        ({"groups": 2}, "pass block='bottleneck'"),
        ({"squeeze": 2.0}, r"squeeze=2.0 must be a number in \[0, 1\]"),
        ({"squeeze": "1/4"}, "squeeze='1/4' must be a number"),
        ({"num_classes": 9}, "no option 'num_classes'; it is 'out_features' here"),
    ),
    "efficientnet_b0": (
        ({"rows": ()}, "at least one row"),
        ({"rows": ((0, "odd", 1, 3, 1, 1, 8),)}, "kind='odd' of"),
        ({"rows": ((0, "plain"),)}, "must be stage, kind"),
        ({"rows": ((0, "plain", 1, 3, 1, 6, 8),)}, "must be 1: a 'plain' block has"),
        ({"rows": ((*ROW[:2], 0, *ROW[3:]),)}, "blocks=0 of"),
        ({"rows": ((*ROW[:3], 4, *ROW[4:]),)}, "kernel=4 of .* must be an odd"),
        ({"rows": ((*ROW[:5], -1, 8),)}, "expansion=-1 of .* must be a posi"),
        ({"rows": ((*ROW[:5], "6", 8),)}, "expansion='6' of .* must be a posi"),
        ({"rows": ((*ROW, 2.0),)}, "squeeze=2.0 of"),
        ({"rows": ((*ROW, 0.0, "x"),)}, "nonlinearity='x' of .* must be one of"),
        ({"squeeze_nonlinearity": "x"}, "squeeze_nonlinearity='x' must be one of"),
    ),
    "vit": (
        ({"heads": 2, "head_dim": 4}, "not both"),
        ({"heads": 5}, "width=8 is not a multiple of heads=5"),
        ({"heads": None}, "not a multiple of head_dim=64"),
        ({"patch_size": 3}, "do not divide an image of 8 x 8"),
        ({"registers": -1}, "registers=-1 must be a whole number, at least 0"),
        ({"out_features": False}, "out_features=False must be a whole number"),
        ({"out_features": 4, "pool": "none"}, "pass out_features=0"),
        ({"class_token": False}, "needs class_token=True"),
        ({"mlp_ratio": 0.3}, "choose widths"),
        ({"rope_theta": 5.0}, "has no effect without rotary=True"),
        ({"rotary": True, "position": False, "heads": 4}, "must be a multiple of 4"),
    ),
    "gpt": (
        ({"dropout": 1.0}, r"dropout=1.0 must be a number in \[0, 1\)"),
        ({"zero_readout": True}, "needs tied=False"),
    ),
    "llama": (
        ({"heads": 4, "queries_per_key": 3}, "query heads, 4, is not a multiple of"),
        ({"heads": 8}, "head_dim=1 must be even"),
        ({"attention_ratio": 0.3}, "the width of all heads is 0.3 times the width"),
        ({"qk_norm": True, "zero_queries": True}, "zero_queries=False"),
        ({"rope_scaling": (8.0, 4.0, 1.0, 16.0)}, "must be below high"),
        ({"experts_per_token": 5}, "must be at most experts=3"),
        ({"balance": -1.0}, "balance=-1.0 must be a number, at least 0"),
        ({"experts": 0, "balance": 0.5}, "balance=0.5 has no effect without experts"),
    ),
    "timm/resnet50.a1_in1k": (({}, r"zoo.load_pretrained\(...\) loads a repository"),),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_named(name):
    for options, said in WRONG[name]:
        with pytest.raises(ValueError, match=said):
            abstract(name, **options)
