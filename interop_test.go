package rdmanet

import (
	"fmt"
	"net"
	"testing"

	"golang.org/x/net/nettest"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
)

// The software device and an RDMA device that speaks iWARP, as siw does, in
// either role: what each says is what the other understands.
func TestConnBetweenDevices(t *testing.T) {
	if !onRDMA {
		t.Skip("RDMANET_VM_ADDR names no RDMA device: vm/test runs this where there is one")
	}
	t.Setenv(deviceEnv, "")
	p := newProvider(t)
	devs, err := p.Devices()
	require.NoError(t, err)
	speaksIWARP := devs[0].Attr().Transport == ibv.TransportIWARP
	for _, lb := range loopbacks {
		for _, roles := range [][2]string{{iwarp.Name, rdmacore.Name}, {rdmacore.Name, iwarp.Name}} {
			t.Run(fmt.Sprintf("%s/%s-%s", lb.network, roles[0], roles[1]), func(t *testing.T) {
				makePair := func() (net.Conn, net.Conn, func(), error) {
					client, server, err := makePipe(lb.network, lb.address, &ListenConfig{Config: Config{Device: roles[1]}},
						&Dialer{Config: Config{Device: roles[0]}})
					if err != nil {
						return nil, nil, nil, err
					}
					return client, server, func() { client.Close(); server.Close() }, nil
				}
				if !speaksIWARP {
					_, _, _, err := makePair()
					require.Error(t, err, "RoCE is not iWARP")
					return
				}
				nettest.TestConn(t, makePair)
			})
		}
	}
}
