package rdmanet

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/fabric"
)

// newSplitFabric has a port of the device for each of two addresses.
func newSplitFabric() *fabric.Fabric {
	fab := fabric.New(fabricMTU, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.IPv6Loopback())
	fab.Split()
	return fab
}

// One reader hears every port of a device, whichever it is that it waits for.
func TestPacketReaderHearsEveryPort(t *testing.T) {
	checkLeaks(t)
	cfg := Config{Provider: newSwitch(t, newSplitFabric())}
	server := packetNet{network: "udp4", address: ":0", cfg: cfg}.listen(t)
	var clients []*PacketConn
	for _, host := range []string{"127.0.0.1", "127.0.0.2"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(host), server.local.Port())
		clients = append(clients, packetNet{network: "udp4", cfg: cfg}.dial(t, udpAddr(to)))
		_, err := clients[len(clients)-1].Write([]byte(host))
		require.NoError(t, err)
		got, _ := readFrom(t, server)
		require.Equal(t, host, string(got))
	}
	require.Len(t, server.Info(), 2)
	for i := range 20 {
		got := make(chan string)
		go func() {
			var b [10]byte
			server.SetReadDeadline(time.Now().Add(patience))
			n, _, err := server.ReadFrom(b[:])
			got <- fmt.Sprint(string(b[:n]), err)
		}()
		require.True(t, eventually(func() bool {
			server.rmu.Lock()
			defer server.rmu.Unlock()
			l := server.ud.first
			return l.wait.Sleeping() && !l.wait.InBackground() || server.readers.Waiting() > 0 // who came later than a keeper waits for it
		}))
		_, err := clients[i%2^1].Write([]byte("x"))
		require.NoError(t, err)
		require.Equal(t, "x<nil>", <-got, "round %d", i)
	}
}

// Two datagrams that come at once wake the reader who waits for others, and the one who
// waits for the device.
func TestPacketWakesAllReaders(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		server := pn.listen(t)
		for range 20 {
			done := make(chan error, 2)
			server.SetReadDeadline(time.Now().Add(patience))
			for range 2 {
				go func() {
					var b [10]byte
					_, _, err := server.ReadFrom(b[:])
					done <- err
				}()
			}
			require.True(t, eventually(func() bool {
				server.rmu.Lock()
				defer server.rmu.Unlock()
				l := server.ud.first
				if waiting := server.readers.Waiting(); l == nil || !l.wait.Sleeping() || l.wait.InBackground() && waiting != 2 || !l.wait.InBackground() && waiting != 1 {
					return false
				}
				for range 2 { // as received does, with nobody between
					server.deliver(server.local, []byte("x"))
					server.rouse()
				}
				return true
			}))
			require.NoError(t, <-done)
			require.NoError(t, <-done)
		}
	})
}

// What happens while a reader polls is not slept over.
func TestPacketBusyPollNotices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.BusyPoll = 5 * time.Millisecond
		server := pn.listen(t)
		client := pn.dial(t, server.LocalAddr())
		_, err := client.Write([]byte("x"))
		require.NoError(t, err)
		readFrom(t, server)
		for i := range 40 {
			done := make(chan error, 1)
			go func() {
				_, _, err := server.ReadFrom(make([]byte, 10))
				done <- err
			}()
			<-time.After(time.Duration(i/2) * 500 * time.Microsecond) // before, at and after the end of a poll
			if i%2 == 0 {
				require.NoError(t, server.SetReadDeadline(past))
			} else {
				_, err := client.Write([]byte("x"))
				require.NoError(t, err)
			}
			within(t, "ReadFrom", func() { err = <-done })
			if i%2 == 0 {
				requireTimeout(t, err)
				require.NoError(t, server.SetReadDeadline(time.Time{}))
			} else {
				require.NoError(t, err)
			}
		}
	})
}
