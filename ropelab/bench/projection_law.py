"""When a pass over q and k pays, and when a product that rotates does: the law behind the study `projection`.

A product ``[T, K] x [K, N]`` reads x and W, writes ``[T, N]``, and computes ``2 T K N`` operations. A pass over q and k
reads and writes ``T (Hq + Hk) D`` numbers of e bytes. With F operations and B bytes a second, and many tokens, the pass
takes this fraction of the product::

    pass / product = (2 e T (Hq + Hk) D / B) / (2 T K N / F) = (e F / (K B)) (Hq + Hk) / (Hq + 2 Hk)

The fraction does not depend on the tokens. It falls with K, because a wider product computes more for each number that
it writes. A product that rotates saves the pass. It pays as long as it is slower than the plain product by less than
this fraction. With few tokens both wait for memory: the product for its weights, and the pass for its launch. Where q
and k are not much larger than the L2 cache, the pass finds a part of them there and takes up to a quarter less.
"""

from dataclasses import dataclass

from ropelab.call.projection_paths import ProductSize


@dataclass(frozen=True)
class Machine:
    """A GPU, as far as the law needs it.

    Attributes:
        flops: the operations a second of a large product.
        bandwidth: the bytes a second of a large copy, which are read and written.
        launch_us: the microseconds that one more launch takes in a CUDA graph.
    """

    flops: float
    bandwidth: float
    launch_us: float = 0.0

    @classmethod
    def measured(cls, product: "Product", product_us: float, copy_us: float, launch_us: float = 0.0) -> "Machine":
        """The machine on which a product, and a copy of the bytes of its pass, took these times."""
        return cls(product.operations / product_us * 1e6, product.pass_bytes / copy_us * 1e6, launch_us)


@dataclass(frozen=True)
class Product:
    """The product that makes q, k and v.

    Attributes:
        tokens, inputs: T and K.
        q_heads, k_heads, head_dim: the heads of q, those of k, which are also those of v, and their features.
        itemsize: e, the bytes of a number.
    """

    tokens: int
    inputs: int
    q_heads: int
    k_heads: int
    head_dim: int = 128
    itemsize: int = 2

    @property
    def outputs(self) -> int:
        """N, the features of q, k and v."""
        return (self.q_heads + 2 * self.k_heads) * self.head_dim

    @property
    def work(self) -> ProductSize:
        """The product as the choice of a path takes it."""
        return ProductSize(self.tokens, self.inputs, self.outputs, (self.q_heads + self.k_heads) * self.head_dim)

    @property
    def operations(self) -> int:
        """The multiplications and additions of the product."""
        return 2 * self.tokens * self.inputs * self.outputs

    @property
    def bytes(self) -> int:
        """The bytes that the product must read and write."""
        tokens, inputs, outputs = self.tokens, self.inputs, self.outputs
        return self.itemsize * (tokens * inputs + inputs * outputs + tokens * outputs)

    @property
    def pass_bytes(self) -> int:
        """The bytes of q and k that a pass reads and writes, without tables."""
        return 2 * self.itemsize * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    def product_us(self, machine: Machine) -> float:
        """The least time of the product: it computes or moves its bytes, whichever takes longer."""
        return max(self.operations / machine.flops, self.bytes / machine.bandwidth) * 1e6

    def pass_us(self, machine: Machine) -> float:
        """The least time of the pass, its launch included."""
        return self.pass_bytes / machine.bandwidth * 1e6 + machine.launch_us

    def most_loss(self, machine: Machine) -> float:
        """The loss of a product that rotates, as a fraction of the plain product, up to which it saves time."""
        return self.pass_us(machine) / self.product_us(machine)


def widest_that_pays(loss: float, machine: Machine, q_heads: int, k_heads: int, itemsize: int = 2) -> float:
    """The most inputs K of a product for which a product that rotates and loses this fraction pays, for many tokens."""
    return itemsize * machine.flops / (loss * machine.bandwidth) * (q_heads + k_heads) / (q_heads + 2 * k_heads)
