package main

import (
	"math/rand/v2"
	"slices"
)

// restarts is how many times the search starts again from a changed copy of the best
// order of a group, for each node of the group.
const restarts = 100

// order returns the nodes from the top down, so that few arrows point upward. Only
// arrows within a group can do so.
//
// The best order of a group is a minimum feedback arc set, which no fast algorithm is
// known for. The search begins with the order of Eades, Lin and Smyth. It then moves
// single nodes for as long as that helps, and repeats this from copies of the best
// order with some nodes moved at random. The random numbers are the same in each run.
func (g *graph) order() []int {
	var all []int
	for _, group := range g.groups() {
		if len(group) > 1 {
			group = g.search(g.greedy(group))
		}
		all = append(all, group...)
	}
	return all
}

// greedy orders a group by the heuristic of Eades, Lin and Smyth. A node that no remaining
// node uses goes to the top, and a node that uses no remaining node goes to the bottom. If
// there is neither, the node whose outgoing arrows exceed its incoming ones by most goes to
// the top.
func (g *graph) greedy(group []int) []int {
	left := slices.Clone(group)
	var top, bottom []int
	for len(left) > 0 {
		best, bestDiff, sink := 0, 0, false
		for i, n := range left {
			in, out := 0, 0
			for _, m := range left {
				if g.uses[m][n] {
					in++
				}
				if g.uses[n][m] {
					out++
				}
			}
			if out == 0 {
				best, sink = i, true
				break
			}
			diff := out - in
			if in == 0 {
				diff = len(group) // above any node that is used
			}
			if i == 0 || diff > bestDiff {
				best, bestDiff = i, diff
			}
		}
		if sink {
			bottom = append(bottom, left[best])
		} else {
			top = append(top, left[best])
		}
		left = slices.Delete(left, best, best+1)
	}
	slices.Reverse(bottom)
	return append(top, bottom...)
}

// search improves an order of a group.
func (g *graph) search(order []int) []int {
	random := rand.New(rand.NewPCG(1, uint64(len(order))))
	best := slices.Clone(order)
	g.settle(best)
	for range restarts * len(order) {
		try := slices.Clone(best)
		change := 0
		for range 2 + random.IntN(3) {
			from, to := random.IntN(len(try)), random.IntN(len(try))
			change += g.gain(try, from, to)
			move(try, from, to)
		}
		change += g.settle(try)
		// An order that is as good is taken, too, so that the search does not stay in one place.
		if change >= 0 {
			best = try
		}
	}
	return best
}

// settle moves single nodes of order to better places until no such move is left. It
// returns how many upward arrows fewer there are.
func (g *graph) settle(order []int) (saved int) {
	for moved := true; moved; {
		moved = false
		for from := range order {
			bestGain, bestTo := 0, from
			for _, step := range []int{-1, 1} {
				gain := 0
				for to := from + step; to >= 0 && to < len(order); to += step {
					gain += g.pass(order[from], order[to], step)
					if gain > bestGain {
						bestGain, bestTo = gain, to
					}
				}
			}
			if bestGain > 0 {
				move(order, from, bestTo)
				saved += bestGain
				moved = true
			}
		}
	}
	return saved
}

// gain is how many upward arrows fewer there are when the node at from moves to to.
func (g *graph) gain(order []int, from, to int) int {
	gain, step := 0, 1
	if to < from {
		step = -1
	}
	for i := from; i != to; {
		i += step
		gain += g.pass(order[from], order[i], step)
	}
	return gain
}

// pass is how many upward arrows fewer there are when node n passes m on its way
// down (step 1) or up (step -1).
func (g *graph) pass(n, m, step int) int {
	gain := 0
	if g.uses[m][n] {
		gain += step
	}
	if g.uses[n][m] {
		gain -= step
	}
	return gain
}

// move moves the node at from to to.
func move(order []int, from, to int) {
	n := order[from]
	if from < to {
		copy(order[from:to], order[from+1:to+1])
	} else {
		copy(order[to+1:from+1], order[to:from])
	}
	order[to] = n
}
