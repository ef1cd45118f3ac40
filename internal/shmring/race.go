//go:build race

package shmring

import "sync/atomic"

// The race detector does not see that a read from shared memory depends on the write to it,
// as the two ends have the memory at different addresses. These calls tell it so, as those
// of package syscall do for sockets.

var raceOrder atomic.Uint32

func raceRelease() { raceOrder.Add(1) }
func raceAcquire() { raceOrder.Load() }
