package rdmanet

import (
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// The leak checks wait for memory to be freed; a second each would add up.
func init() {
	regmem.SetDomainIdle(10 * time.Millisecond)
	regmem.SetChunkIdle(10 * time.Millisecond)
}
