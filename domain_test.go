package rdmanet

import "time"

// The leak checks wait for memory to be freed; a second each would add up.
func init() { domainIdle = 10 * time.Millisecond }
