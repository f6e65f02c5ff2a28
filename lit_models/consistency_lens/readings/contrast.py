"""Contrastive reward of words, and its policy gradient.

Shapes: B samples, K readings of each, W wrong activations of each, D features, t words.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.layers import of_layer
from lit_models.consistency_lens.lens import Lens
from lit_models.training.dropout import mixed
from lit_models.training.metrics import in_float32

NUM_READINGS, NUM_WRONG = 4, 7
_READING = 32  # key of what is drawn


def contrast(lens: Lens, batch: ActivationBatch, activation: Tensor) -> Tensor:
    """Return [B]: minus the mean reward of K drawn readings of activations [B, D], whose gradient
    is the policy gradient.

    The reward of words is the cosine between what the reference's reconstructor makes of them and
    the right activation, less the mean cosine with the wrong ones, all seen from the training
    mean: -2 to 2. That reader has learnt the teacher's words and no code since. Draws follow the
    sample's key; the baseline of a reading is the mean reward of the sample's others.

    Source: Williams 1992, REINFORCE; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for
    free!", equation 8.
    """
    said, rewards, layer = [], [], batch.get("layer")
    with torch.no_grad():
        for draw in range(NUM_READINGS):
            key = mixed(batch["noise_key"], _READING + draw)
            said.append(lens.verbalizer.explain(activation, key, layer=layer).token_ids)
            rewards.append(reward(lens, said[-1], activation, batch["wrong"], layer))
    words, gained = torch.cat(said), torch.stack(rewards)  # [K * B, t], [K, B]
    advantage = (gained - gained.mean(0)) * NUM_READINGS / (NUM_READINGS - 1)  # above the others
    layers = None if layer is None else layer.repeat(NUM_READINGS)
    logits = lens.verbalizer(activation.repeat(NUM_READINGS, 1), words, layers)
    nats = F.cross_entropy(logits.mT, words, reduction="none").sum(-1).view_as(gained)
    policy = (advantage * nats).mean(0)
    return policy - policy.detach() - gained.mean(0)


def reward(
    lens: Lens, words: Tensor, activation: Tensor, wrong: Tensor, layer: Tensor | None = None
) -> Tensor:
    """Return the reward [B] of words [B, t] for activations [B, D], wrong ones [B, W, D]."""
    mean = of_layer(lens.mean, layer)
    rebuilt = in_float32(lens.reference["reconstructor"](lens.words(words), layer) - mean)
    seen = in_float32(
        torch.cat([activation[:, None], wrong.to(activation)], 1) - mean[..., None, :]
    )
    cosines = F.cosine_similarity(rebuilt[:, None], seen, dim=-1)  # [B, 1 + W]
    return cosines[:, 0] - cosines[:, 1:].mean(1)
