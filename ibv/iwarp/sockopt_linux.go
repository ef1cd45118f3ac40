package iwarp

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
)

// haveHeard is set where heard works.
const haveHeard = true

// notSent is how many bytes the socket holds that were not sent yet.
func notSent(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD)
	if err != nil {
		return 0
	}
	return n
}

// acknowledged tells whether the peer has everything that was written to the socket, and the end
// of this direction. A socket that has closed without that never will know.
func acknowledged(fd uintptr) ibv.Ack {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return ibv.AckUnknown
	}
	n, err := unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) // the end counts as one byte
	switch {
	case err != nil:
		return ibv.AckUnknown
	case n == 0:
		return ibv.AckAll
	case info.State == unix.BPF_TCP_CLOSE:
		return ibv.AckNever
	}
	return ibv.AckPending
}

// cork has the socket keep an incomplete segment until its direction ends, but for 200 ms at
// most.
func cork(fd uintptr) { unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, 1) }

// readable reports whether a read would not wait.
func readable(fd uintptr) bool {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		if n, err := unix.Poll(p[:], 0); err != unix.EINTR {
			return n != 0
		}
	}
}

// uncork has the socket send what it keeps.
func uncork(fd uintptr) { unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, 0) }

// heard returns how long ago the socket has received anything. owes is set if the peer's
// kernel should have answered something since then. It is never set if the system does not
// tell, which is so of some that take Linux's place. The kernel counts milliseconds.
//
// These are owed answers:
//
//   - To data that was sent, or sent again, since the peer was heard. If nothing was, then the
//     peer has heard it all, and has no room.
//   - To the end of this direction, which counts as no data. An answer is owed once it was sent
//     again.
//   - To a keep-alive probe. The kernel sends one if it has nothing else to send.
//   - To the question whether a closed window is open. Peers do not answer each, some of the
//     questions or answers may be lost, and the next one takes twice as long. So it counts
//     from the third on.
func heard(fd uintptr) (ago time.Duration, owes bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.Snd_mss == 0 {
		return 0, false
	}
	since := min(info.Last_ack_recv, info.Last_data_recv)
	const windowProbes = 3
	owes = info.Unacked > 0 && (info.Last_data_sent < since || info.Retransmits > 0) ||
		info.Unacked == 0 && info.Notsent_bytes == 0 && info.Probes > 0 ||
		info.Probes >= windowProbes
	return time.Duration(since) * time.Millisecond, owes
}
