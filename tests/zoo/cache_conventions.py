"""Decoding with a cache, by the conventions of several authors of GPTs.

A text is decoded in pieces. `Piecewise` computes a piece from the earlier keys
and values, correctly or with one of FAULTS. By its convention, a model keeps
them in itself, in an object, or in the result of a call. Single broken models
are in broken_models.py.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from small_gpt import BLOCK, DIM, GPT, positions
from torch import nn

FAULTS = {
    "position": "Positions of later pieces are one too high.",
    "mask": "The mask of a later piece is aligned at the top left.",
    "rows": "Rows of the cache are swapped.",
    "twice": "New keys are added twice.",
    "window": "Only five tokens are kept, without a declared window.",
    "given": "Given positions of later pieces are one too high.",
    "stale": "A plain pass after decoding uses the state that is left.",
    "float32": "The cache is allocated in float32, whatever the weights are.",
    "reset": "A new text continues where the last one ended.",
}


class Kept:
    """The keys and values of one layer; attention appends new ones."""

    def __init__(self, pair, fault):
        self.pair, self.fault = pair, fault

    def extend(self, attention, *new):
        old = self.pair or tuple(x[..., :0, :] for x in new)
        if self.fault == "rows":
            old = [x.flip(0) for x in old]
        pair = [torch.cat(both, -2) for both in zip(old, new, strict=True)]
        self.pair = tuple(pair)
        if self.fault == "twice":
            self.pair = tuple(
                map(torch.cat, zip(pair, new, strict=True), (-2, -2))
            )
        if self.fault == "window":
            self.pair = tuple(x[..., -5:, :] for x in pair)
        return pair


class Piecewise(GPT):
    """Base of all conventions; `found` is the name that a report must use."""

    fault = ""
    # names of the faults that a model with this convention can have
    faults = tuple(FAULTS)[:5]
    found = ""
    make_cache = None  # the user's function that makes an empty cache

    def add_parts(self, dim):
        layers = len(self.blocks)
        self.config = SimpleNamespace(n_layer=layers, n_head=2, n_embd=DIM)

    def piece(self, tokens, pairs=None, given=None):
        """Return the scores of a piece, and all keys and values so far.

        Each layer has a pair of keys and values. Positions continue from the
        cache, unless they are given.
        """
        pairs = pairs or [None] * len(self.blocks)
        start = 0 if pairs[0] is None else pairs[0][0].size(-2)
        self.require_length(start + tokens.size(1))
        at = positions(tokens) + start
        off = int(self.fault == "position" and start > 0)
        if given is not None:
            off = int(self.fault == "given" and start > 0)
        where = (at if given is None else given) + off
        x = self.wte(tokens) + self.wpe(where % BLOCK)
        if self.fault == "mask":
            at = positions(tokens)
        end = start + tokens.size(1)
        mask = at.unsqueeze(1) >= torch.arange(end, device=at.device)
        after = []
        for block, pair in zip(self.blocks, pairs, strict=True):
            kept = Kept(pair, self.fault)
            x = block(x, mask, kept)
            after.append(kept.pair)
        return self.scores(x), after


class FlagAndReset(Piecewise):
    """A flag makes the model keep its state; a method clears it. (Raschka)"""

    faults = *Piecewise.faults, "reset", "stale"
    found = "reset_kv_cache() and use_cache=True"
    pairs = None

    def reset_kv_cache(self):
        if self.fault != "reset":
            self.pairs = None

    def forward(self, tokens, use_cache=False):
        if not use_cache and not (self.fault == "stale" and self.pairs):
            return super().forward(tokens)
        scores, self.pairs = self.piece(tokens, self.pairs)
        return scores


class SetupAndPositions(Piecewise):
    """A method allocates the cache once; each piece comes with positions.
    (gpt-fast)"""

    faults = "position", "mask", "rows", "window"
    found = "setup_caches() and input_pos"
    kept = None

    def setup_caches(self, max_batch_size, max_seq_length):
        shape = len(self.blocks), 2, max_batch_size, 2, max_seq_length, 8
        self.kept = torch.zeros(shape).to(self.wte.weight)

    def forward(self, tokens, input_pos=None):
        if input_pos is None:
            return super().forward(tokens)
        if self.kept is None:
            raise TypeError("setup_caches() comes first")
        start = int(input_pos[0])
        pairs = [(k, v) for k, v in self.kept[..., :start, :]]
        scores, pairs = self.piece(tokens, pairs if start else None)
        for layer, pair in zip(self.kept, pairs, strict=True):
            stacked = torch.stack(pair)[..., : self.kept.size(-2), :]
            layer[..., : stacked.size(-2), :] = stacked
        return scores


class Room(nn.Module):
    """A module whose buffer holds the keys and values of one layer."""

    def __init__(self, rows, length, dtype):
        super().__init__()
        room = torch.zeros(2, rows, 2, length, DIM // 2, dtype=dtype)
        self.register_buffer("room", room)


class RoomInEachLayer(SetupAndPositions):
    """Each layer has a module with room for keys and values. (gpt-fast)"""

    faults = *SetupAndPositions.faults, "float32"

    def add_parts(self, dim):
        super().add_parts(dim)
        for block in self.blocks:
            block.mixer.kept = None

    def setup_caches(self, max_batch_size, max_seq_length):
        for block in self.blocks:
            size = max_batch_size, max_seq_length
            block.mixer.kept = Room(*size, self.kind(self.wte.weight.dtype))

    def kind(self, dtype):
        return torch.float32 if self.fault == "float32" else dtype

    def forward(self, tokens, input_pos=None):
        if input_pos is None:
            return GPT.forward(self, tokens)
        rooms = [block.mixer.kept.room for block in self.blocks]
        start = int(input_pos[0])
        pairs = [tuple(room[..., :start, :]) for room in rooms]
        scores, pairs = self.piece(tokens, pairs if start else None)
        for room, pair in zip(rooms, pairs, strict=True):
            stacked = torch.stack(pair)[..., : room.size(-2), :]
            room.index_copy_(3, torch.arange(stacked.size(3)), stacked)
        return scores


class SetUpBeforeReset(RoomInEachLayer):
    """Before set-up, a reset raises; afterwards, calls need a mask.
    (torchtune)"""

    found = "reset_caches() and setup_caches() and input_pos"

    def setup_caches(self, batch_size, dtype, *, decoder_max_seq_len=None):
        if self.blocks[0].mixer.kept is None:
            for block in self.blocks:
                size = batch_size, decoder_max_seq_len
                block.mixer.kept = Room(*size, self.kind(dtype))

    def reset_caches(self):
        for block in self.blocks:
            if block.mixer.kept is None:
                raise RuntimeError("call setup_caches() first")
            block.mixer.kept.room.zero_()

    def forward(self, tokens, *, mask=None, input_pos=None):
        room = self.blocks[0].mixer.kept
        if room is not None:
            if mask is None:
                raise ValueError("a cache needs a mask")
            seen = torch.arange(room.room.size(-2)) <= input_pos.unsqueeze(1)
            assert seen.expand(len(tokens), -1, -1).equal(mask)
        return super().forward(tokens, input_pos)


class SetAndClear(SetupAndPositions):
    """One method makes room for the cache, another removes it. (litgpt)"""

    found = "clear_kv_cache() and set_kv_cache() and input_pos"
    setup_caches = None

    def set_kv_cache(self, batch_size, max_seq_length=None, device=None):
        SetupAndPositions.setup_caches(self, batch_size, BLOCK)

    def clear_kv_cache(self):
        self.kept = None


class KVCache:
    """A cache that the caller makes and that grows in place. (nanochat)"""

    def __init__(self, batch_size, num_heads, seq_len, head_dim, num_layers):
        assert (num_heads, head_dim) == (2, DIM // 2)
        self.pairs = [None] * num_layers


def by_hand(batch):
    return SimpleNamespace(pairs=None, batch=batch)


class MadeByHand(Piecewise):
    """The cache is an object that grows; its class is in the model's file."""

    found = "kv_cache=KVCache()"

    def forward(self, tokens, targets=None, kv_cache=None):
        if kv_cache is None:
            return super().forward(tokens)
        scores, kv_cache.pairs = self.piece(tokens, kv_cache.pairs)
        return scores


class Named(MadeByHand):
    """The cache is an object of a class that only the user can name."""

    found = "kv_cache=by_hand()"
    __module__, make_cache = "elsewhere", staticmethod(by_hand)


def in_single(batch):
    """Return empty keys and values for two layers, in the default dtype."""
    return [[torch.zeros(batch, 2, 0, DIM // 2)] * 2 for _ in range(2)]


class MadeInSingle(Piecewise):
    """A function of the user makes an empty cache for some rows."""

    found, make_cache = "cache=in_single()", staticmethod(in_single)
    faults = "position", "rows"

    def forward(self, tokens, cache=None):
        if cache is None:
            return super().forward(tokens)
        layers = len(self.blocks)
        kinds = {pair[0].dtype for pair in cache} - {torch.float32}
        dtype = self.wte.weight.dtype
        if not kinds and dtype not in (torch.float32, torch.float64):
            raise RuntimeError(f"expected {dtype}, but the cache has float32")
        pairs = cache[:layers] if cache[0][0].size(-2) else None
        scores, cache[:layers] = self.piece(tokens, pairs)
        return scores


def room_of(batch, length):
    return torch.zeros(2, 2, batch, 2, length, DIM // 2)


class RoomInSingle(SetupAndPositions):
    """A function of the user makes room for some rows and some length."""

    found, make_cache = "cache=room_of() and input_pos", staticmethod(room_of)
    faults = "position", "rows"
    setup_caches = None

    def forward(self, tokens, cache=None, input_pos=None):
        if cache is None:
            return GPT.forward(self, tokens)
        if cache.dtype != self.wte.weight.dtype:
            raise RuntimeError(f"the cache has dtype {cache.dtype}")
        self.kept = cache[: len(self.blocks)]
        return super().forward(tokens, input_pos)


class Mover:
    """A callable object that makes room on a given device."""

    def __call__(self, batch, device):
        return room_of(batch, BLOCK).to(device)


class RoomOnDevice(RoomInSingle):
    """A callable object, made by the user, makes room on a device."""

    found, make_cache = "cache=Mover() and input_pos", Mover()


def in_any(batch, dtype=None):
    """Return empty keys and values; accept a dtype, but ignore it."""
    return in_single(batch)


class RoomDeclared(SetupAndPositions):
    """The model has room for a count of rows that it declares. (Llama)"""

    found, rows = "start_pos: ", 4
    setup_caches = None

    def add_parts(self, dim):
        super().add_parts(dim)
        self.declare()
        shape = len(self.blocks), 2, self.rows, 2, BLOCK, DIM // 2
        self.register_buffer("room", torch.zeros(shape), persistent=False)

    def declare(self):
        self.max_batch_size = self.rows

    def forward(self, tokens, start_pos=None):
        if start_pos is None:
            return GPT.forward(self, tokens)
        if len(tokens) > self.rows:
            raise RuntimeError(f"{len(tokens)} rows, and room for {self.rows}")
        self.kept = self.room[:, :, : len(tokens)]
        at = torch.arange(start_pos, start_pos + 1)
        return super().forward(tokens, at)


class RoomInParams(RoomDeclared):
    """The attribute params declares the count of rows."""

    rows = 2
    faults = "position", "mask", "window"

    def declare(self):
        self.params = SimpleNamespace(max_batch_size=self.rows)


class RoomInConfig(RoomInParams):
    """A dict, the attribute config, declares the count of rows."""

    rows = 1

    def declare(self):
        self.config = {"max_batch_size": 1, "n_layer": len(self.blocks)}


class WindowOfPieces(Piecewise):
    """Positions see four tokens; longer pieces are refused. (litgpt)"""

    found, most = "past and use_cache=True", 4
    # no faults here: they would show in the first piece that is split
    faults = ()
    window = 4

    def sees(self, i, j):
        return (j <= i) & (j > i - self.window)

    def piece(self, tokens, past=None):
        pairs, start = past or ([None] * len(self.blocks), 0)
        self.require_piece(tokens.size(1), start)
        self.require_length(start + tokens.size(1))
        at = positions(tokens) + start
        off = int(self.fault == "position" and start > 0)
        x = self.wte(tokens) + self.wpe((at + off) % BLOCK)
        held = 0 if pairs[0] is None else pairs[0][0].size(-2)
        end = start + tokens.size(1)
        seen = self.sees(at.unsqueeze(1), torch.arange(start - held, end))
        if self.fault == "mask":
            seen = seen | (at.unsqueeze(1) >= torch.arange(start - held, end))
        after = []
        for block, pair in zip(self.blocks, pairs, strict=True):
            kept = Kept(pair, self.fault)
            x = block(x, seen, kept)
            after.append([x[..., -self.window :, :] for x in kept.pair])
        return self.scores(x), (after, end)

    def require_piece(self, size, start):
        if size > self.most:
            raise ValueError(f"a piece of {size} in a window of {self.most}")

    def forward(self, tokens, past=None, use_cache=False):
        if not use_cache:
            return super().forward(tokens)
        return self.piece(tokens, past)


class WindowOfThree(WindowOfPieces):
    """A piece of more than three tokens is not implemented."""

    most = 3

    def require_piece(self, size, start):
        if size > self.most:
            raise NotImplementedError(f"{size} tokens in {self.most} places")


class WindowThenOne(WindowOfPieces):
    """The first piece has up to four tokens, and each later piece has one."""

    def require_piece(self, size, start):
        super().require_piece(size, start)
        if start and size > 1:
            raise ValueError("one token goes on at a time")


class WindowCrash(WindowOfPieces):
    """A long piece makes the model crash, and nothing declares the limit."""

    found = ""

    def require_piece(self, size, start):
        if size > self.most:
            raise RuntimeError("the size of a tensor must match")


class OnlyIfGiven(Piecewise):
    """A call returns caches only if it is given a list, one per layer."""

    found = "caches=[None, ...]"

    def forward(self, tokens, caches=None):
        scores, after = self.piece(tokens, caches and [*caches])
        return scores if caches is None else (scores, after)


@dataclass
class Intermediates:
    hiddens: list
    pairs: list


class WholeText(Piecewise):
    """Each call gets the whole text and returns hidden states.
    (x-transformers)

    With a cache only the last token is computed and returned.
    """

    found = "cache and return_intermediates=True"

    def forward(self, tokens, return_intermediates=False, cache=None):
        if cache is not None:
            tokens = tokens[:, -1:]
        scores, pairs = self.piece(tokens, cache and cache.pairs)
        if not return_intermediates:
            return scores
        return scores, Intermediates([scores], pairs)


class PastAndPresent(Piecewise):
    """A call returns (logits, presents), by the oldest convention. (GPT-2)"""

    found = "past: "

    def forward(self, tokens, past=None):
        return self.piece(tokens, past)


class Stacked(Piecewise):
    """A call returns its scores, and one tensor that caches all layers."""

    found = "past_kvs and use_cache=True"

    def forward(self, tokens, past_kvs=None, use_cache=False):
        pairs = None if past_kvs is None else [*map(tuple, past_kvs)]
        scores, after = self.piece(tokens, pairs)
        if not use_cache:
            return scores
        return scores, torch.stack([torch.stack(pair) for pair in after])


class PositionsLeftOut(Piecewise):
    """Positions are optional; by default they continue from the cache."""

    faults = tuple(FAULTS)[:6]
    found = "past_key_values and use_cache=True, also with position_ids: "

    def forward(
        self, tokens, position_ids=None, past_key_values=None, use_cache=False
    ):
        past = past_key_values
        scores, after = self.piece(tokens, past, position_ids)
        return (scores, after) if use_cache else scores


class InferenceParams(Piecewise):
    """The caller makes room and counts the tokens. (flash-attn)"""

    found = "inference_params=InferenceParams()"

    def forward(self, tokens, position_ids=None, inference_params=None):
        if inference_params is None:
            return super().forward(tokens)
        kept = inference_params.key_value_memory_dict
        start = inference_params.seqlen_offset
        pairs = kept["pairs"] if start else None
        if pairs and self.fault not in ("twice", "window"):
            assert pairs[0][0].size(-2) == start
        scores, kept["pairs"] = self.piece(tokens, pairs, position_ids)
        return scores


class LastPosition(Piecewise):
    """A call returns a dict with the scores of the last position only."""

    found = "kv and return_kv=True"

    def forward(self, tokens, kv=None, return_kv=False):
        scores, after = self.piece(tokens, kv)
        if not return_kv:
            return scores
        return {"logits": scores[:, -1], "kv": after}


class ToldWhere(Piecewise):
    """A call returns the cache; the caller passes the length of the cache."""

    found = "kv_caches and start_pos: "

    def forward(self, tokens, kv_caches=None, start_pos=0):
        scores, after = self.piece(tokens, kv_caches)
        assert start_pos == (kv_caches[0][0].size(-2) if kv_caches else 0) or (
            self.fault in ("twice", "window")
        )
        return scores, after


class Recurrent(Piecewise):
    """An LSTM model that takes its state, a pair (h, c), as `hidden`."""

    found, faults = "hidden: ", ("rows", "twice")

    def add_parts(self, dim):
        self.cell = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, tokens, hidden=None):
        x = self.wte(tokens)
        if hidden and self.fault == "rows":
            hidden = tuple(part.flip(1) for part in hidden)
        y, after = self.cell(x, hidden)
        if self.fault == "twice":
            _, after = self.cell(x[:, -1:], after)
        return self.head(y), after


class PrevHiddens(Recurrent):
    """If a call gets a state, it reads only the last token. (minGRU)"""

    found = "prev_hiddens and return_prev_hiddens=True"

    def forward(self, tokens, return_prev_hiddens=False, prev_hiddens=None):
        if prev_hiddens is not None:
            tokens = tokens[:, -1:]
        scores, after = super().forward(tokens, prev_hiddens)
        return (scores, after) if return_prev_hiddens else scores


class OneState(Recurrent):
    """A GRU model that returns its state as one tensor."""

    found = "state: "

    def add_parts(self, dim):
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def forward(self, tokens, state=None):
        x = self.wte(tokens)
        if state is not None and self.fault == "rows":
            state = state.flip(1)
        y, after = self.cell(x, state)
        if self.fault == "twice":
            _, after = self.cell(x[:, -1:], after)
        return {"logits": self.head(y), "state": after}


class Generates(Piecewise):
    """Only the model's own method generate decodes with a cache."""

    found = "generate with use_cache=True and use_cache=False"

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=0.7, use_cache=True):
        pairs, piece = None, idx
        for _ in range(max_new_tokens):
            scores, after = self.piece(piece if use_cache else idx, pairs)
            chances = (scores[:, -1] / temperature).softmax(-1)
            idx = torch.cat([idx, torch.multinomial(chances, 1)], 1)
            if use_cache:
                pairs, piece = after, idx[:, -1:]
        return idx


CONVENTIONS = [
    kind for kind in [*globals().values()] if getattr(kind, "found", "")
]
