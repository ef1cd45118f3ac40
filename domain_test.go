package rdmanet

import "time"

// The leak checks wait for memory to be freed; a second each would add up.
func init() { domainIdle, bouncePools.idle = 10*time.Millisecond, 10*time.Millisecond }
