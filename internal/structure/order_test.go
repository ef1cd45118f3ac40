package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// graphOf makes a graph of arrows such as "a>b".
func graphOf(arrows string) *graph {
	of := map[string]map[string]map[string]bool{}
	for _, a := range strings.Fields(arrows) {
		from, to, _ := strings.Cut(a, ">")
		link(of, from, from, "")
		if to != "" {
			link(of, to, to, "")
			link(of, from, to, "x")
		}
	}
	return newGraph(of)
}

func TestOrder(t *testing.T) {
	for _, test := range []struct {
		name, arrows string
		upward       int
		only         string // upward arrows, where there is one best order
		floors       string // from the lowest, where there is one best order
	}{
		{"one room", "a", 0, "", "a"},
		{"no arrows", "a b", 0, "", "a b"},
		{"chain", "a>b b>c", 0, "", "c | b | a"},
		{"names in the other order", "c>b b>a", 0, "", "a | b | c"},
		{"above the highest", "a>b b>c a>c d>c", 0, "", "c | b d | a"},
		{"two apart", "a>b c>d", 0, "", "b d | a c"},
		{"pair", "a>b b>a", 1, "", ""},
		{"ring of three", "a>b b>c c>a", 1, "", ""},
		{"two rings that share an arrow", "a>b b>c c>a b>d d>a", 1, "a>b", "a | c d | b"},
		{"one room against many", "a>b a>c a>d b>a", 1, "b>a", "b c d | a"},
		{"two pairs", "a>b b>a c>d d>c b>c", 2, "", ""},
		{"all use all", "a>b a>c a>d b>a b>c b>d c>a c>b c>d d>a d>b d>c", 6, "", ""},
		{"a ring between a user and what is used", "top>a a>b b>a b>base", 1, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := graphOf(test.arrows)
			order := g.order()
			require.Equal(t, len(g.names), len(order))
			var up []string
			for _, a := range g.upward(order) {
				up = append(up, g.names[a[0]]+">"+g.names[a[1]])
			}
			require.Len(t, up, test.upward)
			if test.only != "" {
				assert.Equal(t, test.only, strings.Join(up, " "))
			}
			if test.floors != "" {
				var floors []string
				for _, f := range g.floors(order) {
					floors = append(floors, strings.Join(g.namesOf(f), " "))
				}
				assert.Equal(t, test.floors, strings.Join(floors, " | "))
			}
		})
	}
}

func TestGroups(t *testing.T) {
	for _, test := range []struct{ arrows, groups string }{
		{"a>b b>c", "a | b | c"},
		{"c>b b>a", "c | b | a"},
		{"a>b b>a c>a", "c | a b"},
		{"a>b b>c c>a c>d d>e e>d", "a b c | d e"},
	} {
		g := graphOf(test.arrows)
		var groups []string
		for _, group := range g.groups() {
			groups = append(groups, strings.Join(g.namesOf(group), " "))
		}
		assert.Equal(t, test.groups, strings.Join(groups, " | "), test.arrows)
	}
}

// TestOrderIsBest compares the search with all orders of small random graphs.
func TestOrderIsBest(t *testing.T) {
	for seed := range uint64(150) {
		g := randomGraph(seed, 3+int(seed%5))
		want := len(g.names) * len(g.names)
		permute(len(g.names), func(order []int) { want = min(want, len(g.upward(order))) })
		require.Len(t, g.upward(g.order()), want, "seed %d", seed)
	}
}

// TestOrderIsTheSame wants the same order each time, without moves left that help.
func TestOrderIsTheSame(t *testing.T) {
	g := randomGraph(1, 30)
	order := g.order()
	assert.Equal(t, order, g.order())
	up := len(g.upward(order))
	for from := range order {
		for to := range order {
			moved := slices.Clone(order)
			gain := g.gain(moved, from, to)
			move(moved, from, to)
			require.Equal(t, up-gain, len(g.upward(moved)), "from %d to %d", from, to)
			require.LessOrEqual(t, gain, 0, "from %d to %d", from, to)
		}
	}
}

// randomGraph makes a graph of n nodes in which a third of all arrows are there.
func randomGraph(seed uint64, n int) *graph {
	random := rand.New(rand.NewPCG(seed, 0))
	g := &graph{}
	for a := range n {
		g.names = append(g.names, string(rune('A'+a)))
		row := make([]bool, n)
		for b := range n {
			row[b] = a != b && random.IntN(3) == 0
		}
		g.uses = append(g.uses, row)
	}
	return g
}

// permute calls f with each order of n nodes.
func permute(n int, f func([]int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var from func(i int)
	from = func(i int) {
		if i == n {
			f(order)
			return
		}
		for j := i; j < n; j++ {
			order[i], order[j] = order[j], order[i]
			from(i + 1)
			order[i], order[j] = order[j], order[i]
		}
	}
	from(0)
}
