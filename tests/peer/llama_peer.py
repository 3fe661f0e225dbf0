"""The Python twin of examples/llama and of its hash rule for weights and tokens (examples/llama/hash_rule.h)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

MASK = (1 << 64) - 1


def as_signed(value):
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def fnv1a(text):
    digest = 0xCBF29CE484222325
    for byte in text.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & MASK
    return digest


def shift_right(z, bits):
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x):
    z = x + as_signed(0x9E3779B97F4A7C15)
    z = (z ^ shift_right(z, 30)) * as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * as_signed(0x94D049BB133111EB)
    return z ^ shift_right(z, 31)


def hash_param(name, shape):
    count = 1
    for extent in shape:
        count *= extent
    z = splitmix64(torch.arange(count, dtype=torch.int64) + as_signed(fnv1a(name)))
    if len(shape) >= 2:
        exponent = (shape[-1].bit_length() - 1) // 2
        value = (shift_right(z, 40) - (1 << 23)).to(torch.float32) * 2.0 ** -(23 + exponent)
    else:
        value = 1.0 + (shift_right(z, 56) - 128).to(torch.float32) * 2.0**-10
    return value.view(shape)


def hash_tokens(step, micro, accum, rank, world, batch, seq, vocab):
    first = ((step * accum + micro) * world + rank) * batch
    z = splitmix64(torch.arange(first, first + batch, dtype=torch.int64) + as_signed(fnv1a("tokens")))
    start, stride = shift_right(z, 33) % vocab, 1 + (shift_right(z, 8) & 7)
    tokens = (start[:, None] + torch.arange(seq + 1)[None, :] * stride[:, None]) % vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c["heads"], c["kv_heads"], c["dim"] // c["heads"]
        kv_dim = self.kv_heads * self.head_dim
        self.wq = nn.Linear(c["dim"], c["dim"], bias=False)
        self.wk = nn.Linear(c["dim"], kv_dim, bias=False)
        self.wv = nn.Linear(c["dim"], kv_dim, bias=False)
        self.wo = nn.Linear(c["dim"], c["dim"], bias=False)
        self.cos = self.sin = None  # made at the first call

    def grow_tables(self, time):
        rates = 1.0 / (10000.0 ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim))
        angles = torch.outer(torch.arange(time, dtype=torch.float32), rates)
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x):
        time = x.shape[2]
        if self.cos is None or len(self.cos) < time:
            self.grow_tables(time)
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return x * self.cos[:time].to(x.dtype) + turned * self.sin[:time].to(x.dtype)

    def forward(self, x):
        batch, time, dim = x.shape

        def split(y, heads):
            return y.view(batch, time, heads, self.head_dim).transpose(1, 2)

        q, k = self.rotate(split(self.wq(x), self.heads)), self.rotate(split(self.wk(x), self.kv_heads))
        out = F.scaled_dot_product_attention(q, k, split(self.wv(x), self.kv_heads), is_causal=True,
                                             enable_gqa=self.heads != self.kv_heads)
        return self.wo(out.transpose(1, 2).reshape(batch, time, dim))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1 = nn.Linear(c["dim"], c["ffn"], bias=False)
        self.w2 = nn.Linear(c["ffn"], c["dim"], bias=False)
        self.w3 = nn.Linear(c["dim"], c["ffn"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.ffn_norm = RMSNorm(c["dim"]), RMSNorm(c["dim"])

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c["vocab"], c["dim"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm = RMSNorm(c["dim"])
        self.output = nn.Linear(c["dim"], c["vocab"], bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x)
        return self.output(self.norm(x))


def hashed_llama(config):
    model = Llama(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(hash_param(name, tuple(param.shape)))
    return model
