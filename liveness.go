package rdmanet

import "time"

// oneWay is what has come since this side last sent something.
type oneWay struct {
	posts uint64    // Stats.Posts when it was last looked
	since time.Time // when that was found to have changed
	bytes uint64    // Stats.BytesReceived then
}

const (
	// confirmEvery is a quarter of the shortest KeepAlive that is of use.
	confirmEvery = 250 * time.Millisecond

	// confirmFrom is from how many bytes on data can keep a probe from its answer.
	// A peer that sends less than that now and then gets no messages for it.
	confirmFrom = 64 << 10
)
