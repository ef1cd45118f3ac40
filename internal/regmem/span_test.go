package regmem

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Memory that the application has unmapped without Free is forgotten when the
// system has given the addresses away again.
func TestStaleMemory(t *testing.T) {
	var m spans
	mem := make([]byte, 9000)
	at := func(from, to int, ours bool) *span {
		s := newSpan(mem[from:to], to-from)
		s.ours = ours
		return s
	}
	left, stale1, stale2, right := at(0, 1000, true), at(1000, 3000, false), at(4000, 5000, false), at(6000, 9000, false)
	for _, s := range []*span{right, stale2, left, stale1} {
		require.True(t, m.insert(s))
	}
	require.Equal(t, []*span{left, stale1, stale2, right}, m.list())
	require.False(t, m.insert(at(500, 4500, true)), "part of it is ours already")
	require.False(t, m.insert(at(2999, 3001, false)))
	ours := at(2000, 6000, true)
	require.True(t, m.insert(ours))
	require.Equal(t, []*span{left, ours, right}, m.list())
	m.remove(stale1) // Free after all
	m.remove(left)
	require.Equal(t, []*span{ours, right}, m.list())
}
