package udconn

import (
	"log/slog"
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Settings are what the caller chooses for a Conn.
type Settings struct {
	Log      *slog.Logger  // Log receives at level Debug what fails. It is not nil.
	BusyPoll time.Duration // BusyPoll is the setting of the same name of package cqwait, for receives.
	Linger   time.Duration // Linger bounds how long Close waits for datagrams that were posted.
	Lasting  bool          // Lasting is an argument of regmem.Acquire.
	Advice   regmem.Advice // Advice is an argument of regmem.Acquire.
	Software string        // Software is the device name that the UDP socket has in Info and in errors.
	Bounds   Bounds
}

// Bounds limit what a Conn keeps of others, and how often it asks for them.
type Bounds struct {
	Peers      int // Peers is the number of addresses that a Conn keeps.
	Waiting    int // Waiting is the number of datagrams that wait for one address to be resolved.
	UDPSenders int // UDPSenders is the number of senders by UDP that a Conn remembers.
	Requesters int // Requesters is the number of requesters that are not rdmanet and have sent nothing yet.
	Resolvers  int // Resolvers is the number of addresses that are resolved at a time.
	Groups     int // Groups is the number of multicast groups that a Conn is a member of.

	// A peer that is silent for MinSilence is resolved again, because it may have been
	// started anew. The time doubles, up to MaxSilence, each time that the peer answers as
	// before and sends nothing.
	MinSilence time.Duration
	MaxSilence time.Duration

	// SuspicionPause is the time between two resolutions of a peer that has not moved.
	// Datagrams and requests in its name may be forged.
	SuspicionPause time.Duration

	// FailurePause is the time for which an address that nobody serves is not resolved again.
	FailurePause time.Duration

	// UDPPause is the time for which a peer that is reached by UDP is not resolved again.
	UDPPause time.Duration

	// Timeouts has the time that each request for an address may take. TimeoutsBesideUDP
	// takes its place where the UDP socket is open as well.
	Timeouts          []time.Duration
	TimeoutsBesideUDP []time.Duration

	// JoinTimeout bounds how long one multicast group may take to be joined.
	JoinTimeout time.Duration

	// RejoinPause is the time before a group is tried again that the next queue pair could not
	// join. It doubles up to MaxRejoinPause.
	RejoinPause    time.Duration
	MaxRejoinPause time.Duration
}

// DefaultBounds returns the Bounds for general use. beforeUDP is how long a device may take
// to resolve an address before the UDP socket gets its turn.
func DefaultBounds(beforeUDP time.Duration) Bounds {
	return Bounds{
		Peers: 1024, Waiting: 16, UDPSenders: 4096, Requesters: 256, Resolvers: 32, Groups: 64,
		MinSilence: 2 * time.Second, MaxSilence: 16 * time.Second,
		SuspicionPause: time.Second, FailurePause: time.Second, UDPPause: 30 * time.Second,
		Timeouts:          []time.Duration{time.Second, 2 * time.Second, 4 * time.Second},
		TimeoutsBesideUDP: []time.Duration{beforeUDP / 2, beforeUDP / 2},
		JoinTimeout:       5 * time.Second,
		RejoinPause:       100 * time.Millisecond,
		MaxRejoinPause:    10 * time.Second,
	}
}
