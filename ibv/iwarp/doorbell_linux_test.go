//go:build amd64 || arm64

package iwarp

import (
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/leaktest"
)

func doorbellPair(t *testing.T) (x, y *doorbell) {
	t.Helper()
	ours, theirs, err := newDoorbells()
	require.NoError(t, err)
	x, err = newDoorbell(ours)
	require.NoError(t, err)
	t.Cleanup(x.close)
	y, err = newDoorbell(theirs)
	require.NoError(t, err)
	t.Cleanup(y.close)
	return x, y
}

// Each ring wakes the peer's reader and its writer, however often it rings and whoever has rung
// before.
func TestDoorbellRings(t *testing.T) {
	leaktest.Check(t)
	x, y := doorbellPair(t)
	// sleep has the reader and the writer of an end look, sleep, and look once more. It returns when
	// both have looked.
	sleep := func(d *doorbell) (done chan error) {
		done = make(chan error, 2)
		var looked sync.WaitGroup
		twice := func() func(uintptr) bool {
			looked.Add(1)
			before := false
			return func(uintptr) bool {
				if before {
					return true
				}
				before = true
				looked.Done()
				return false
			}
		}
		d.waitRead, d.waitWrite = twice(), twice()
		go func() { done <- d.awaitRead() }()
		go func() { done <- d.awaitWrite() }()
		looked.Wait()
		return done
	}
	wake := func(from *doorbell, done chan error) {
		from.press()
		for range 2 {
			require.NoError(t, soon(t, func() error { return <-done }))
		}
	}
	for range 100 {
		xDone, yDone := sleep(x), sleep(y)
		wake(x, yDone)
		wake(y, xDone)
	}
}

// Closing a doorbell ends the waits for it, and the peer may ring afterwards.
func TestDoorbellCloses(t *testing.T) {
	leaktest.Check(t)
	x, y := doorbellPair(t)
	done := make(chan error)
	x.waitRead = func(uintptr) bool { return false }
	go func() { done <- x.awaitRead() }()
	x.close()
	require.ErrorIs(t, soon(t, func() error { return <-done }), net.ErrClosed)
	y.press()
	x.press()
}
