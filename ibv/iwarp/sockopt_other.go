//go:build !linux

package iwarp

import (
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

// haveHeard is set where heard works.
const haveHeard = false

// notSent is how many bytes the socket holds that were not sent yet, which these systems
// do not tell.
func notSent(uintptr) int { return 0 }

// acknowledged is not known on these systems.
func acknowledged(uintptr) ibv.Ack { return ibv.AckUnknown }

// cork does nothing on these systems: what is written is sent at once.
func cork(uintptr) {}

// heard is not known on these systems.
func heard(uintptr) (ago time.Duration, owes bool) { return 0, false }
