"""Options out of range or in conflict are refused with the value and the rule."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import pytest
import torch

from datamodules import (
    ActivationDataModule,
    Augmentation,
    Columns,
    InstructionDataModule,
    OccupationDataModule,
    PagesDataModule,
    RankingDataModule,
    RetrievalDataModule,
    TextSplit,
)
from datamodules.files.splitting import SplitOptions
from datamodules.scored.store import LabelOptions
from datamodules.search.candidates import Bm25Options, CandidateOptions, GroupOptions, HardNegatives
from datamodules.search.collection import CollectionFiles, CollectionRequest
from datamodules.search.retrieval import TrainingMix
from datamodules.text.encoding import TextLimits
from datamodules.tokenizers.codes import CodeSystem, TextOptions
from datamodules.tokenizers.text import TokenizerOptions
from lit_models import LitCausalLM, LitPreference, LitSeq2Seq
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import Samples
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LossWeight, TeacherText, TemperatureSchedule
from lit_models.consistency_lens.subject import BaseOptions, SubjectOptions
from lit_models.occupation_coder.decoding import DecodingOptions
from lit_models.occupation_coder.encoders import CharacterEncoder, NgramTable
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.loss import OccupationLossOptions
from lit_models.occupation_coder.network import BlockDecoder
from lit_models.seo.networks import HeadOptions, TemperatureOptions
from lit_models.seo.retriever import Fusion
from lit_models.seq2seq.decoding import Seq2SeqDecoding
from lit_models.seq2seq.network import Seq2SeqConfig
from tests.consistency_lens.small_lens import module_of
from tests.occupation_coder.test_module import small_coder
from tests.occupation_coder.tiny import trie_of

decoder = partial(replace, DecoderConfig(hidden_size=16, num_heads=4, num_kv_heads=2))
lora = partial(LoraOptions, ["q_proj"])
preference = partial(LitPreference, optimizer=torch.optim.SGD)
language_model = partial(LitCausalLM, torch.optim.SGD)
seq2seq = partial(LitSeq2Seq, torch.optim.SGD)
MINED = {"mined": 3, "unjudged_as_negative": True}


def teacher(told: int) -> None:
    TeacherText(told).check(6)


def head(loss: Any) -> None:
    HeadOptions(loss).loss_of("q", "binary")


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (LoraOptions, {"targets": []}, "lora.targets names no layer"),
    (lora, {"rank": 0}, "lora.rank must be at least 1, got 0"),
    (lora, {"alpha": 0.0}, "lora.alpha must be at least 1e-06, got 0.0"),
    (GenerationOptions, {"temperature": -1.0}, "generation.temperature must be at least 0, got -1"),
    (GenerationOptions, {"top_k": 0}, "generation.top_k must be at least 1, got 0"),
    (GenerationOptions, {"stop": [""]}, "stop must be a list of texts that are not empty"),
    (GenerationOptions, {"stop": "ab"}, "stop must be a list of texts .* not empty, got .ab."),
    (decoder, {"num_heads": 3}, "hidden_size 16 must be a multiple of 6"),
    (decoder, {"num_kv_heads": 3}, "num_heads 4 of num_kv_heads 3"),
    (decoder, {"num_layers": 0}, "network.num_layers must be at least 1, got 0"),
    (language_model, {"network": "gpt5"}, '"gpt5" is no preset; choose one of gpt2-124m'),
    (language_model, {"network": "depth-0"}, '"depth-0" is no preset; choose one of gpt2-124m'),
    (preference, {"beta": 0}, "model.beta must be at least 1e-06, got 0"),
    (Seq2SeqDecoding, {"num_beams": 0}, "decoding.num_beams must be at least 1, got 0"),
    (Seq2SeqDecoding, {"num_beams": 2, "temperature": 1.0}, "temperature must be 0 beside num_b"),
    (Seq2SeqDecoding, {"top_p": 0.0}, "decoding.top_p must be 1e-06 to 1, got 0.0"),
    (Seq2SeqConfig, {"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
    (seq2seq, {"lora": lora(base_dtype="bfloat16")}, "base_dtype is bfloat16; an encoder with a"),
    (lora, {"dropout": 1.0}, "lora.dropout must be 0 to 0.99, got 1.0"),
    (decoder, {"dropout": 1.0}, "network.dropout must be 0 to 0.99, got 1.0"),
    (Seq2SeqConfig, {"dropout": 1.0}, "network.dropout must be 0 to 0.99, got 1.0"),
    (Samples, {"prompts": ["a"], "every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
    (LossWeight, {"weight": -1.0}, r"a weight and a begin of 0 or more .* got .*weight=-1\.0"),
    (LossWeight, {"begin": 5, "end": 5}, "an end after its begin, got .*begin=5, end=5"),
    (TemperatureSchedule, {"begin": 9, "until": 9}, "before until, got .*begin=9, until=9"),
    (TemperatureSchedule, {"floor": -1}, "a floor and a begin of 0 or more, .*floor=-1"),
    (BaseOptions, {"is_frozen": True, "unfreeze_at": 5}, "unfreeze_at exclude each other, since"),
    (BaseOptions, {"lora": lora(base_dtype="bfloat16")}, "dtype: leave lora.base_dtype out"),
    (LensOptions, {"num_words": 0}, "lens.num_words must be at least 1, got 0"),
    (LensOptions, {"prompt": "says nothing"}, "lens.prompt must name the activation's place once"),
    (SubjectOptions, {}, "a lens needs one subject"),
    (SubjectOptions, {"path": "x", "network": DecoderConfig()}, "a lens needs one subject"),
    (module_of, {"best_of": 0}, "model.best_of must be at least 1, got 0"),
    (teacher, {"told": -1}, "teacher.told -1 must be 0 to 6, the words"),
    (teacher, {"told": 7}, "teacher.told 7 must be 0 to 6, the words"),
    (
        ActivationDataModule,
        {"activations": "acts", "test_files": ["y.txt"]},
        "data.activations is acts, whose documents .* leave data",
    ),
    (DecodingOptions, {"method": "greddy"}, "must be flat, greedy, beam or mixed, got 'greddy'"),
    (DecodingOptions, {"beam_size": 0}, "decoding.beam_size must be at least 1, got 0"),
    (DecodingOptions, {"k_best": 0}, "decoding.k_best must be at least 1, got 0"),
    (DecodingOptions, {"review_below": 1.5}, "review_below must be 0 to 1, got 1.5"),
    (DecodingOptions, {"flat_share": -1}, "flat_share must be 0 to 1, got -1"),
    *(
        (OccupationLossOptions, {name: 1.5}, f"loss.{name} must be 0 to 1, got 1.5")
        for name in ("seq2seq_weight", "label_smoothing", "flat_dropout", "repeats")
    ),
    (
        OccupationLossOptions,
        {"linear": LinearOptions(), "seq2seq_weight": 0.0},
        "raise seq2seq_weight",
    ),
    *(
        (LinearOptions, {"head_weight": 1.0, "head_ends": ends}, "a list of single words or signs")
        for ends in (("part of",), ("",), (" of",), "of")
    ),
    *(
        (small_coder, {"temperature": given}, f"above 0 of seq2seq and flat, got {given}")
        for given in ({"flatt": 1.0}, {"flat": 0.0}, {"seq2seq": nan})
    ),
    (partial(CharacterEncoder, 1), {"width": 10, "num_heads": 4}, "multiple of 2 x num_heads"),
    (partial(NgramTable, 8, (), 16), {}, "ngram_sizes must be one or more numbers"),
    (
        partial(BlockDecoder, 8, trie_of(2)),
        {"width": 10, "num_heads": 4},
        "width 10 must be a multiple of num_heads",
    ),
    (head, {"loss": "mse"}, 'model.heads.q: loss "mse" does not fit a binary head'),
    (Fusion, {"weight": 1.5}, "fusion.weight must be 0 to 1, got 1.5"),
    *(
        (TemperatureOptions, {"start": start}, r"temperature\.start must be between 0\.005 and 1")
        for start in (0.0, 0.001, 2.0)
    ),
    (CandidateOptions, {"source": "run"}, "candidates.run None; a run goes with source run"),
    (CandidateOptions, {"run": "a.trec"}, '"judged" and candidates.run .a.trec.; a run goes'),
    (CandidateOptions, {"top": 0}, "candidates.top must be at least 1, got 0"),
    (GroupOptions, {"size": 1}, "groups.size must be at least 2, got 1"),
    (GroupOptions, {"mined": 8}, "groups.mined must be 0 to 7, got 8"),
    (GroupOptions, {**MINED, "after_rank": -1}, "after_rank must be at least 0, got -1"),
    (GroupOptions, {"after_rank": 2}, "groups.after_rank with both; got 0, False and 2"),
    (GroupOptions, {"unjudged_as_negative": True}, "groups.mined goes with .* got 0, True and"),
    (GroupOptions, {"mined": 3}, "mined documents are unjudged, .* got 3, False and 0"),
    (
        RankingDataModule,
        {"groups": GroupOptions(**MINED)},
        "mined is 3, but candidates.source judged has noth",
    ),
    (
        RankingDataModule,
        {"predict_queries": "q.tsv"},
        "nothing is judged for data.predict_queries q.tsv; set",
    ),
    (Augmentation, {"delete": 1.2}, r"augmentation\.delete must be 0 to 1, got 1.2"),
    (Augmentation, {"drop_language": -1}, r"augmentation\.drop_language must be 0 to 1, got -1"),
    (Augmentation, {"num_edits": 0}, r"augmentation\.num_edits must be at least 1, got 0"),
    (CodeSystem, {"length": 0}, "length must be at least 1"),
    (CodeSystem, {"max_codes": 6}, "max_codes must be 1 to 5, got 6"),
    (
        OccupationDataModule,
        {"train_files": "a", "validation_files": "b", "columns": Columns(split="part")},
        r'columns.split \("part"\) divides the training files',
    ),
    (TextOptions, {"max_length": 0}, "text.max_length must be at least 1, got 0"),
    (PagesDataModule, {"max_target_tokens": 512}, "max_target_tokens must be 1 to 511, got 512"),
    (partial(SplitOptions, 1.5, 0), {}, "validation_share must be 0 to 0.9, got 1.5"),
    (partial(SplitOptions, 0.5, 0.5), {}, "at most 0.9, got 1"),
    (TextLimits, {"stemmer": "klingon"}, "english"),
    (TextLimits, {"stopwords": "klingon"}, "english"),
    (
        TokenizerOptions,
        {"kind": "bytes", "vocab_size": 300},
        "kind bytes takes no size, got vocab_size; name",
    ),
    (
        TokenizerOptions,
        {"kind": "bpe", "path": "x"},
        "kind bpe takes vocab_size, got path; name",
    ),
    (TokenizerOptions, {"kind": "folder"}, "kind folder takes path, got none"),
    (TokenizerOptions, {"kind": "bpe", "min_count": 2}, "bpe takes vocab_size, got min_count"),
    (LabelOptions, {"kind": "binary", "separator": ";"}, "separator ';' on a binary head: a multi"),
    (
        LabelOptions,
        {"kind": "multilabel"},
        "separator None on a multilabel head: a multil",
    ),
    (LabelOptions, {"kind": "multilabel", "separator": ";"}, "needs the names of its cla"),
    (LabelOptions, {"kind": "regression", "classes": ["a", "b"]}, "no effect on a regression head"),
    (LabelOptions, {"kind": "binary", "classes": ["a", "b", "c"]}, "a binary head has two classes"),
    (LabelOptions, {"kind": "ordinal", "classes": ["a", "a"]}, "two or more different names"),
    (InstructionDataModule, {"context_length": 0}, "context_length must be at least 1, got 0"),
    (InstructionDataModule, {"split": TextSplit(by="tail")}, '"tail" would cut samples apart'),
    (TrainingMix, {"judged": -1}, r"mix\.judged, .* must be 0 or more, .* got \[-1, 0, 0\]"),
    (partial(TrainingMix, 0, 0), {}, r"one of them above 0, got \[0, 0, 0\]"),
    (TrainingMix, {"removal": 2}, r"mix\.removal must be 0 to 1, got 2"),
    (partial(HardNegatives, -1), {}, r"negatives\.count must be at least 0"),
    (HardNegatives, {"depth": 3, "skip": 3}, "negatives.skip must be 0 to 2, got 3"),
    (partial(HardNegatives, 1, "run"), {}, "negatives.run None; a run goes with source run, and"),
    (RetrievalDataModule, {"predict_depth": 0}, "predict_depth must be at least 1, got 0"),
    (RetrievalDataModule, {"num_others": -1}, "num_others must be at least 0, got -1"),
    (Bm25Options, {"k1": -1}, r"bm25\.k1 must be at least 0, got -1"),
    (Bm25Options, {"b": 2}, r"bm25\.b must be 0 to 1, got 2"),
    (Bm25Options, {"stopwords": "latin"}, 'stopwords must be none or english, got "latin"'),
    (CollectionRequest, {"files": CollectionFiles(train="y")}, "folder is missing; name th"),
]


@pytest.mark.parametrize(("make", "options", "message"), WRONG)
def test_options_that_cannot_be_meant_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
