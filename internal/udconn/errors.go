package udconn

import (
	"errors"
	"fmt"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// The texts name what programs know, the methods and settings of package rdmanet.

// errTooLong refuses a datagram that is longer than the limit.
var errTooLong = fmt.Errorf("longer than PacketConn.MaxDatagramSize: %w", errno.EMSGSIZE)

// errListenGroup refuses to bind the address of a group. Package net would bind another
// address in its place, and would not join the group.
var errListenGroup = fmt.Errorf("to hear a group take ListenMulticast, to hear broadcasts listen on every address: %w", errors.ErrUnsupported)

// errLowPort refuses to send to a group from a port that the immediate data cannot carry.
var errLowPort = fmt.Errorf("datagrams to groups from a port below %d: %w", minGroupPort, errors.ErrUnsupported)

// errNoRoom says that the send queue is full. Callers of a Conn do not see it.
var errNoRoom = errors.New("the send queue is full")

// errNoBroadcast refuses a broadcast address. software is the device name of the UDP socket.
func errNoBroadcast(software string) error {
	return fmt.Errorf("RDMA devices have no broadcast: send to a multicast group, or by the software device, Config.Device %q: %w",
		software, errors.ErrUnsupported)
}
