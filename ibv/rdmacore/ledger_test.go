//go:build linux && cgo

package rdmacore

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// posted returns a ledger for as many entries, with IDs from 100.
func posted(t *testing.T, entries ...entry) *ledger {
	t.Helper()
	l := &ledger{ring: make([]entry, len(entries))}
	for i, e := range entries {
		e.id = uint64(100 + i)
		n, ok := l.add(e)
		require.True(t, ok)
		require.Equal(t, uint64(i), n)
	}
	return l
}

// left returns the IDs that a flush completes.
func left(l *ledger) (ids []uint64) {
	var wcs [2]ibv.WC
	for {
		n := l.flush(wcs[:], 7)
		for _, wc := range wcs[:n] {
			ids = append(ids, wc.ID)
		}
		if n < len(wcs) {
			return ids
		}
	}
}

var (
	send   = entry{}
	read   = entry{read: true, sink: 9}
	fenced = entry{fenced: true}
)

func TestLedgerComplete(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries []entry
		done    []uint64
		left    []uint64
	}{
		{"nothing", []entry{send, read}, nil, []uint64{100, 101}},
		{"all", []entry{send, send}, []uint64{0, 1}, nil},
		{"a success nobody wanted", []entry{send, send, send}, []uint64{1}, []uint64{102}},
		{"a read is late", []entry{send, read, send}, []uint64{2}, []uint64{101}},
		{"not behind a fence", []entry{read, fenced, send}, []uint64{1}, []uint64{102}},
		{"reads are in order", []entry{read, send, read, read}, []uint64{2}, []uint64{103}},
		{"late after all", []entry{read, send}, []uint64{1, 0}, nil},
	} {
		l := posted(t, c.entries...)
		for _, n := range c.done {
			id, ok := l.complete(n)
			assert.True(t, ok, c.name)
			assert.Equal(t, 100+n, id, c.name)
			_, ok = l.complete(n)
			assert.False(t, ok, "%s: twice", c.name)
		}
		assert.Equal(t, c.left, left(l), c.name)
		assert.True(t, l.empty(), c.name)
		for n := range uint64(len(c.entries)) {
			_, ok := l.complete(n)
			assert.False(t, ok, "%s: %d is complete", c.name, n)
		}
	}
}

func TestLedgerFull(t *testing.T) {
	l := posted(t, send, send)
	_, ok := l.add(send)
	assert.False(t, ok)
	_, ok = l.complete(0)
	assert.True(t, ok)
	n, ok := l.add(entry{id: 5})
	assert.True(t, ok)
	assert.Equal(t, uint64(2), n)
	assert.Equal(t, []uint64{101, 5}, left(l))
}

func TestLedgerTakeBack(t *testing.T) {
	l := posted(t, send, send, send)
	assert.Equal(t, 2, l.takeBack(2))
	_, ok := l.complete(1)
	assert.False(t, ok)
	n, ok := l.add(entry{id: 5})
	assert.True(t, ok)
	assert.Equal(t, uint64(1), n)
	var wcs [1]ibv.WC
	assert.Equal(t, 1, l.flush(wcs[:], 7))
	assert.Equal(t, ibv.WC{ID: 100, Status: ibv.WCFlushErr, QPN: 7}, wcs[0])
	assert.Equal(t, 1, l.takeBack(2), "the other is flushed")
	assert.Equal(t, 3, new(ledger).takeBack(3), "no ledger is kept")
}

func TestLedgerReadsInto(t *testing.T) {
	l := posted(t, send, read, send)
	assert.True(t, l.readsInto(9))
	assert.False(t, l.readsInto(8))
	assert.False(t, l.readsInto(0), "sends have no destination")
	l.complete(2)
	assert.True(t, l.readsInto(9), "it may be late")
	l.complete(1)
	assert.False(t, l.readsInto(9))
}
