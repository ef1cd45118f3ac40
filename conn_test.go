package rdmanet

import (
	"fmt"
	"net"
	"reflect"
	"testing"

	"golang.org/x/net/nettest"
)

// loopbacks are the addresses that every test of conns runs over.
var loopbacks = []struct{ network, address string }{
	{"rdma4", local4},
	{"rdma6", local6},
}

// pipe makes a connected pair.
func pipe(t testing.TB, network, address string, lc *ListenConfig, d *Dialer) (client, server *Conn) {
	t.Helper()
	client, server, err := makePipe(network, address, lc, d)
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func makePipe(network, address string, lc *ListenConfig, d *Dialer) (client, server *Conn, err error) {
	ln, err := lc.Listen(tctx, network, address)
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	type accepted struct {
		c   net.Conn
		err error
	}
	ch := make(chan accepted, 1)
	go func() {
		c, err := ln.Accept()
		ch <- accepted{c, err}
	}()
	c, err := d.DialContext(tctx, network, ln.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	a := <-ch
	if a.err != nil {
		c.Close()
		return nil, nil, a.err
	}
	return c.(*Conn), a.c.(*Conn), nil
}

// The contract of net.Conn, with the dialling and the listening end in either
// role.
func TestConn(t *testing.T) {
	for _, lb := range loopbacks {
		for _, swap := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/swap=%v", lb.network, swap), func(t *testing.T) {
				nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
					client, server, err := makePipe(lb.network, lb.address, new(ListenConfig), new(Dialer))
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
}

// A Conn and a Listener have the methods that are documented, and none by way of what they
// embed.
func TestNothingPromoted(t *testing.T) {
	for _, inside := range []reflect.Type{reflect.TypeFor[*conn](), reflect.TypeFor[*listener]()} {
		for i := range inside.NumMethod() {
			t.Errorf("%v.%s is promoted", inside, inside.Method(i).Name)
		}
	}
}
