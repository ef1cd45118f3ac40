package main

import (
	"maps"
	"slices"
)

// A graph has nodes that are numbered by the order of their names.
type graph struct {
	names []string
	uses  [][]bool // uses[a][b] says whether there is an arrow from a to b
}

// newGraph makes a graph of the rooms of one of a module's maps.
func newGraph(of map[string]map[string]map[string]bool) *graph {
	g := &graph{names: slices.Sorted(maps.Keys(of))}
	number := map[string]int{}
	for i, name := range g.names {
		number[name] = i
	}
	for _, name := range g.names {
		row := make([]bool, len(g.names))
		for used := range of[name] {
			row[number[used]] = true
		}
		g.uses = append(g.uses, row)
	}
	return g
}

// namesOf returns the names of nodes, sorted.
func (g *graph) namesOf(nodes []int) []string {
	var names []string
	for _, n := range nodes {
		names = append(names, g.names[n])
	}
	slices.Sort(names)
	return names
}

// groups returns the strongly connected components: two nodes are in one group if
// each leads to the other. A group follows all groups that lead to it. Within a group
// the nodes are sorted.
func (g *graph) groups() [][]int {
	// This is Tarjan's algorithm. It finds a group after all groups that it leads to.
	var (
		all   [][]int
		stack []int
		count int
	)
	index := make([]int, len(g.names)) // order of discovery from 1
	low := make([]int, len(g.names))
	on := make([]bool, len(g.names)) // on the stack
	var visit func(n int)
	visit = func(n int) {
		count++
		index[n], low[n] = count, count
		stack = append(stack, n)
		on[n] = true
		for m, used := range g.uses[n] {
			switch {
			case !used:
			case index[m] == 0:
				visit(m)
				low[n] = min(low[n], low[m])
			case on[m]:
				low[n] = min(low[n], index[m])
			}
		}
		if low[n] == index[n] {
			at := slices.Index(stack, n)
			group := slices.Sorted(slices.Values(stack[at:]))
			stack = stack[:at]
			for _, m := range group {
				on[m] = false
			}
			all = append(all, group)
		}
	}
	for n := range g.names {
		if index[n] == 0 {
			visit(n)
		}
	}
	slices.Reverse(all)
	return all
}

// upward returns the arrows that point from a later node of order to an earlier one,
// sorted.
func (g *graph) upward(order []int) [][2]int {
	place := placesIn(order)
	var all [][2]int
	for a, row := range g.uses {
		for b, used := range row {
			if used && place[b] < place[a] {
				all = append(all, [2]int{a, b})
			}
		}
	}
	return all
}

// floors puts each node one floor above the highest node that it uses, upward arrows
// left aside. The lowest floor comes first.
func (g *graph) floors(order []int) [][]int {
	place := placesIn(order)
	floor := make([]int, len(order))
	var floors [][]int
	for _, a := range slices.Backward(order) {
		for b, used := range g.uses[a] {
			if used && place[b] > place[a] {
				floor[a] = max(floor[a], floor[b]+1)
			}
		}
		for len(floors) <= floor[a] {
			floors = append(floors, nil)
		}
		floors[floor[a]] = append(floors[floor[a]], a)
	}
	return floors
}

// placesIn returns the place of each node in order.
func placesIn(order []int) []int {
	place := make([]int, len(order))
	for i, n := range order {
		place[n] = i
	}
	return place
}
