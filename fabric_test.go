package rdmanet

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/nettest"

	"github.com/rdmanet/rdmanet/internal/fabric"
)

// eachFabric runs f over the ideal device in memory and looks for leaks. The device reports
// that it pins memory, as adapters do, or that it does not, as the software device.
func eachFabric(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, pins := range []bool{false, true} {
		t.Run(fmt.Sprintf("pins=%v", pins), func(t *testing.T) {
			checkLeaks(t)
			fab := fabric.New(4096, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
			if pins {
				fab.PinMemory()
			}
			f(t, Config{Provider: newSwitch(t, fab)})
		})
	}
}

// fabricPipe makes a connected pair over a fabric.
func fabricPipe(network string, cfg Config) (client, server *Conn, err error) {
	address := map[string]string{"rdma4": "127.0.0.1:0", "rdma6": "[::1]:0"}[network]
	return makePipe(network, address, &ListenConfig{Config: cfg}, &Dialer{Config: cfg})
}

// The contract of net.Conn holds over a device whose requests are complete when they are posted.
func TestConnOverFabric(t *testing.T) {
	eachFabric(t, func(t *testing.T, cfg Config) {
		for _, network := range []string{"rdma4", "rdma6"} {
			for _, swap := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/swap=%v", network, swap), func(t *testing.T) {
					nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
						client, server, err := fabricPipe(network, cfg)
						if err != nil {
							return nil, nil, nil, err
						}
						c1, c2 = client, server
						if swap {
							c1, c2 = c2, c1
						}
						return c1, c2, func() { c1.Close(); c2.Close() }, nil
					})
				})
			}
		}
	})
}

// Large writes go by RDMA Read, or by RDMA Write, both ways at once.
func TestTransfersOverFabric(t *testing.T) {
	eachFabric(t, func(t *testing.T, cfg Config) {
		for _, noRead := range []bool{false, true} {
			cfg.TransferSize, cfg.NoRDMARead = 512<<10, noRead
			client, server, err := fabricPipe("rdma4", cfg)
			require.NoError(t, err)
			exchange(t, client, server, 5<<20)
			for _, c := range []*Conn{client, server} {
				s := c.Stats()
				require.NotZero(t, s.TransfersSent)
				require.GreaterOrEqual(t, s.TransferBytesReceived, uint64(4<<20))
				require.NoError(t, c.Close())
			}
		}
	})
}
