"""The constants on first and last layers, and on those of tied tables."""

import math
from collections.abc import Iterator

from ..rules.roles import Role
from .carry import Carry
from .depth import Depth
from .kinds import alike
from .pair import Pair
from .program import MOVES, Node, is_scaled
from .roles import Found
from .sums import Sum

# By which power of a fan-in the initial entries of a kernel shrink.
POWERS = {Role.INPUT: 0.0, Role.HIDDEN: 0.5, Role.OUTPUT: 1.0}


class Readouts:
    """Follows constants beside first and last layers, which parameters carry."""

    def __init__(self, pair: Pair, depth: Depth, carry: Carry):
        self._pair, self._large, self._small = pair, pair.large, pair.small
        self._depth, self._carry = depth, carry

    def follow(self, sums: list[Sum]) -> None:
        """Constants beside first and last layers are forward multipliers of theirs."""
        # Constants at the ends of branches and on logits were looked at before.
        every = [*self._large.branches.all, *self._depth.averaged]
        known = {self._large.path(e) for b in every for e in b.ends}
        for each in sums:
            known |= self._large.all_params(each)
        sides = [side for each in sums for side in each.sides]
        for node in (*(b.end for b in every), *sides):
            known |= self._large.sources(node, linear=True)
        for kind in self._pair.layers():
            ratios = kind.ratios(
                lambda now, then: self._pair.ratio(now.node, then.node)
            )
            for (role, before), ratio in zip(kind.twins, ratios, strict=True):
                scale, path = self._carry.found[role.path], role.path
                if role.tied_node:
                    self._follow_tied(path, path in known)
                if scale.role not in POWERS and path not in known:
                    self._follow_bias(role, before)
                if role.tied_node or scale.role not in POWERS:
                    continue
                assert role.node is not None
                if path in known:
                    ratio = 1.0
                else:
                    kind.check_known(ratios, role.node)
                parts = self._large.parts_with(path, role.node)
                if self._large.sums.is_scale_free(*parts):  # weight normalization
                    if parts[0] is self._large.param(path):
                        self._follow_norm(role, before, ratio)
                elif not alike(ratio, 1):
                    self._carry.multiply(path, 1 / ratio)

    def _follow_bias(self, role: Found, before: Found) -> None:
        """A bias carries the constant that multiplies it and a kernel's results."""
        kernels = self._large.factors.biased(role.node)
        paths = {path for x in kernels for path in self._large.params(x)}
        if kernels and not paths & self._pair.beside.keys():
            assert role.node is not None
            assert before.node is not None
            now, then = self._large.factors, self._small.factors
            ratio = now.outer(role.node) / then.outer(before.node)
            if not alike(ratio, 1):
                self._carry.multiply(role.path, 1 / ratio)

    def _follow_norm(self, role: Found, before: Found, ratio: float) -> None:
        """Entries of a normalized kernel have a size of their own: its gain carries.

        Args:
          role, before: of the kernel, and of that of the base.
          ratio: of the constants on the layer.

        Raises:
          ValueError: the size is not that of the kernel's role, and there is no gain.
        """
        node, then = role.node, before.node
        assert node is not None
        assert then is not None
        after, first = (
            self._large.factors.norm(node),
            self._small.factors.norm(then),
        )
        if not (after and first) or self._large.sums.is_scale_free(node):
            return
        scale = self._carry.found[role.path]
        right = scale.width_in ** -POWERS[scale.role]
        rest = right / ratio * first / after
        if alike(rest, 1):
            return
        weight = next(x for x in node.operands if x.weight)
        for gain, at in ((weight, node), *self._gains_after(node)):
            paths = self._large.params(gain) - {role.path}
            if paths and not self._large.elsewhere(paths, {at.id}, {(at.id, -1)}, ()):
                for path in paths:
                    self._carry.multiply(path, rest)
                return
        width = max(scale.width_in, scale.width_out)
        raise ValueError(
            f"{role.path!r} is divided by a norm, so that its entries grow by "
            f"{ratio * after / first:.4g} and not by {right:.4g}: multiply the result "
            f"of the product ({role.line}) by {rest:.4g}, i.e. by (width / base width)"
            f"**{math.log(rest) / math.log(width):.4g}"
        )

    def _gains_after(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """The gain that multiplies the result of a product next, and where."""
        users = self._large.axes.uses(node)
        while len(users) == 1 and (users[0].op in MOVES or is_scaled(users[0])):
            node, users = users[0], self._large.axes.uses(users[0])
        for user in users if len(users) == 1 and users[0].op == "mul" else ():
            if gain := self._large.factors.with_weight(user):
                yield gain, user

    def _follow_tied(self, path: str, known: bool) -> None:
        """A tied readout needs a multiplier of 1/m, which the last norm may carry.

        Args:
          path: the table.
          known: whether the constants on its rows were looked at before.
        """
        scale, role = self._carry.found[path], self._large.roles[path]
        before, width = self._small.roles[self._pair.twin[path]], scale.width_out
        if scale.role is not Role.INPUT or width == 1:
            return
        assert role is not None
        assert role.tied_node is not None
        assert before is not None
        now, then = role.tied_node, before.tied_node
        assert then is not None
        if not known:
            self._carry.multiply(path, 1 / self._pair.ratio(role.node, before.node))
        # The table carries what multiplies it, also as the readout.
        ratio = self._pair.ratio(now, then) * self._carry.found[path].carried
        for m, at, power in ((self._large, now, 1), (self._small, then, -1)):
            table = next(x for x in at.operands if x.weight)
            ratio *= m.factors.unit(table) ** power  # 1 / n^½ for unit vectors
        if alike(ratio, 1 / width) or self._large.sums.only_chooses(now):
            return
        if self._large.parts_with(path, now)[0] is not self._large.param(path):
            return  # the first part looks after the logits
        data = next(x for x in now.operands if x.data)
        rest = 1 / width / ratio
        logits = [
            Sum(x, (side,), round(width))
            for x in (event.node for event in self._large.events(path))
            if x.spot == now.spot and x.op == now.op  # also of a second batch
            for side in x.operands
            if side.data
        ]
        paths = self._large.params(data)
        if not self._carry.can_carry(paths, logits):
            other = "".join(
                f"; or, if the loss uses these logits alone, return only them by "
                f"call=lambda model, *inputs: ..., so that {name!r} can carry it"
                for name in sorted(paths)[:1]
            )
            raise ValueError(
                f"the embedding {path!r} is also the readout ({now.line}); its logits "
                f"need a multiplier of base width / width (here {1 / width:.4g}), of "
                f"which they have {ratio:.4g}: multiply the logits, or the input of "
                f"this product, by {rest:.4g}, i.e. by (base width / width)**"
                f"{math.log(rest) / -math.log(width):.4g}{other}"
            )
        self._carry.carry_sums(paths, rest, logits)
