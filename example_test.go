package rdmanet_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
)

// A server and a client, as over TCP.
func Example() {
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		io.Copy(conn, conn)
	}()

	conn, err := rdmanet.Dial("rdma", ln.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "hello over a queue pair")
	answer := make([]byte, 23)
	if _, err := io.ReadFull(conn, answer); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", answer)
	// Output: hello over a queue pair
}

// An HTTP server and client differ from those over TCP in one line each.
func Example_http() {
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0") // instead of net.Listen
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "you asked for %s", r.URL.Path)
	}))

	client := http.Client{Transport: &http.Transport{
		DialContext: rdmanet.DialContext, // instead of a net.Dialer's
	}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + ln.Addr().String() + "/this")
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", body)
	// Output: you asked for /this
}

// Deadlines work as on any net.Conn: a read that met one can be repeated.
func ExampleConn_SetReadDeadline() {
	server, client := connect()
	defer server.Close()
	defer client.Close()

	client.SetReadDeadline(time.Now().Add(-time.Second))
	p := make([]byte, 10)
	_, err := client.Read(p)
	fmt.Println(errors.Is(err, os.ErrDeadlineExceeded))

	client.SetReadDeadline(time.Time{}) // none
	fmt.Fprint(server, "better late")
	n, err := client.Read(p[:6])
	fmt.Printf("%s %v\n", p[:n], err)
	// Output:
	// true
	// better <nil>
}

// CloseWrite ends one direction; the answer still comes in the other.
func ExampleConn_CloseWrite() {
	server, client := connect()
	defer client.Close()
	go func() {
		defer server.Close()
		question, err := io.ReadAll(server)
		if err == nil {
			fmt.Fprintf(server, "%d bytes arrived", len(question))
		}
	}()

	fmt.Fprint(client, "all that I have")
	if err := client.CloseWrite(); err != nil {
		log.Fatal(err)
	}
	answer, err := io.ReadAll(client)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", answer)
	// Output: 15 bytes arrived
}

// Messages arrive as they were sent, whatever the boundaries of the segments.
func ExampleConn_WriteMsg() {
	server, client := connect()
	defer server.Close()
	defer client.Close()

	go func() {
		for _, msg := range []string{"one", "two", "three"} {
			if _, err := client.WriteMsg([]byte(msg)); err != nil {
				log.Fatal(err)
			}
		}
	}()
	p := make([]byte, 1024)
	for range 3 {
		n, err := server.ReadMsg(p)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q\n", p[:n])
	}
	// Output:
	// "one"
	// "two"
	// "three"
}

// A message in pieces, an urgent one that goes ahead of what else waits, and one that
// is queued and then not wanted.
func ExampleConn_WriteMsg_pieces() {
	server, client := connect()
	defer server.Close()
	defer client.Close()

	received := make(chan string)
	go func() {
		p := make([]byte, 1024)
		for range 4 {
			n, flags, err := server.ReadPiece(p)
			if err != nil {
				log.Fatal(err)
			}
			received <- fmt.Sprintf("%q, expedited: %v, more to come: %v", p[:n], flags&rdmanet.Expedited != 0, flags&rdmanet.Partial != 0)
		}
	}()

	send := func(msg string, opts ...rdmanet.MsgOption) {
		if _, err := client.WriteMsg([]byte(msg), opts...); err != nil {
			log.Fatal(err)
		}
	}
	send("a message ", rdmanet.Partial)
	urgent := client.QueueMsg([]byte("urgent"), rdmanet.Expedited) // waits for the end of that
	unwanted := client.QueueMsg([]byte("unwanted"), rdmanet.Expedited)
	fmt.Println("cancelled:", unwanted.Cancel())
	send("in two pieces")
	fmt.Println(<-received)
	fmt.Println(<-received)
	fmt.Println(<-received)
	if _, err := urgent.Result(); err != nil {
		log.Fatal(err)
	}
	send("")
	fmt.Println(<-received)
	// Output:
	// cancelled: true
	// "a message ", expedited: false, more to come: true
	// "in two pieces", expedited: false, more to come: false
	// "urgent", expedited: true, more to come: false
	// "", expedited: false, more to come: false
}

// Sending without blocking: what there is room for is taken, and a channel tells when
// there is more.
func ExampleConn_Writable() {
	server, client := connect()
	defer server.Close()
	defer client.Close()
	received := make(chan int)
	go func() {
		p := make([]byte, 2<<20)
		n, err := server.ReadMsg(p)
		if err != nil {
			log.Fatal(err)
		}
		received <- n
	}()

	rest := make([]byte, 1<<20)
	for len(rest) > 0 {
		n, err := client.WriteMsg(rest, rdmanet.NonBlocking)
		if err != nil && !errors.Is(err, syscall.EAGAIN) {
			log.Fatal(err)
		}
		if rest = rest[n:]; len(rest) > 0 {
			<-client.Writable() // beside other channels, in a select
		}
	}
	fmt.Println(<-received)
	// Output: 1048576
}

// From Alloc's memory the devices move what is large by themselves, and into it.
func ExampleAlloc() {
	server, client := connect()
	defer server.Close()
	const size = 8 << 20
	out, err := rdmanet.Alloc(size)
	if err != nil {
		log.Fatal(err)
	}
	defer out.Free()
	in, err := rdmanet.Alloc(size)
	if err != nil {
		log.Fatal(err)
	}
	defer in.Free()

	copy(out.Bytes()[size-3:], "end")
	go func() {
		defer client.Close()
		if _, err := client.Write(out.Bytes()); err != nil {
			log.Fatal(err)
		}
	}()
	if _, err := io.ReadFull(server, in.Bytes()); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", in.Bytes()[size-3:])
	// Output: end
}

// Info tells what the addresses of a connection cannot.
func ExampleConn_Info() {
	server, client := connect()
	defer server.Close()
	defer client.Close()

	info := client.Info()
	fmt.Println(info.Device, info.RemoteGID)
	fmt.Println("CloseWrite works:", info.Extensions.HalfClose)
	// Output:
	// iwarp ::ffff:127.0.0.1
	// CloseWrite works: true
}

// A Dialer sets limits for one connection; its zero value is what Dial uses.
func ExampleDialer() {
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if conn, err := ln.Accept(); err == nil {
			defer conn.Close()
			fmt.Fprint(conn, "welcome")
		}
	}()

	d := rdmanet.Dialer{
		Timeout: 5 * time.Second,
		Config: rdmanet.Config{
			Device:    "iwarp",
			KeepAlive: 30 * time.Second,
		},
	}
	conn, err := d.DialContext(context.Background(), "rdma", ln.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	greeting, err := io.ReadAll(conn)
	fmt.Printf("%s %v\n", greeting, err)
	// Output: welcome <nil>
}

// What is true of the connections of one Listener stands in its ListenConfig.
func ExampleListenConfig() {
	lc := rdmanet.ListenConfig{
		Backlog: 100,
		Config: rdmanet.Config{
			Device:    "iwarp",
			KeepAlive: 30 * time.Second,
			Logger:    slog.Default(), // hears at level Debug why connections fail
		},
	}
	ln, err := lc.Listen(context.Background(), "rdma4", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	ln.(*rdmanet.Listener).SetDeadline(time.Now().Add(time.Millisecond))
	_, err = ln.Accept()
	fmt.Println(errors.Is(err, os.ErrDeadlineExceeded))
	// Output: true
}

// TLS goes over a connection as it does over TCP's: RDMA encrypts nothing.
func Example_tls() {
	server, client := connect()
	cert, pool := certificate()
	go func() {
		conn := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{cert}})
		defer conn.Close()
		io.Copy(conn, conn)
	}()

	conn := tls.Client(client, &tls.Config{RootCAs: pool, ServerName: "server.example"})
	defer conn.Close()
	fmt.Fprint(conn, "a secret")
	answer := make([]byte, 8)
	if _, err := io.ReadFull(conn, answer); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", answer)
	// Output: a secret
}

// certificate makes one for server.example, and a pool that trusts it.
func certificate() (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		log.Fatal(err)
	}
	template := x509.Certificate{DNSNames: []string{"server.example"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		log.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		log.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// The errors are those of package net, so what tests for them still works.
func ExampleDial_errors() {
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close() // so nobody listens there

	_, err = rdmanet.Dial("rdma", addr)
	var opErr *net.OpError
	if errors.As(err, &opErr) {
		fmt.Println(opErr.Op, opErr.Net, opErr.Addr.String() == addr)
	}
	// Output: dial rdma true
}

// connect returns the two ends of a connection.
func connect() (server, client *rdmanet.Conn) {
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	dialed := make(chan net.Conn, 1)
	go func() {
		conn, err := rdmanet.Dial("rdma", ln.Addr().String())
		if err != nil {
			log.Fatal(err)
		}
		dialed <- conn
	}()
	accepted, err := ln.Accept()
	if err != nil {
		log.Fatal(err)
	}
	return accepted.(*rdmanet.Conn), (<-dialed).(*rdmanet.Conn)
}

// Datagrams, as over UDP.
func ExampleListenPacket() {
	p, err := rdmanet.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			p.WriteTo(buf[:n], from)
		}
	}()

	conn, err := rdmanet.Dial("udp", p.LocalAddr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	answer := make([]byte, 1500)
	for { // datagrams may be lost
		fmt.Fprint(conn, "hello in one piece")
		conn.SetReadDeadline(time.Now().Add(time.Second))
		n, err := conn.Read(answer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", answer[:n])
		break
	}
	_, err = conn.Write(make([]byte, conn.(*rdmanet.PacketConn).MaxDatagramSize()+1))
	fmt.Println(errors.Is(err, syscall.EMSGSIZE))
	// Output:
	// hello in one piece
	// true
}

// Several datagrams a call.
func ExamplePacketConn_WriteBatch() {
	server, err := rdmanet.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	to := server.LocalAddr().(*net.UDPAddr).AddrPort()
	client, err := rdmanet.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	words := []rdmanet.Datagram{
		{Buf: []byte("one"), Addr: to},
		{Buf: []byte("two"), Addr: to},
		{Buf: []byte("three"), Addr: to},
	}
	n, err := client.(*rdmanet.PacketConn).WriteBatch(words)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("wrote", n)

	got := make([]rdmanet.Datagram, 16)
	for i := range got {
		got[i].Buf = make([]byte, 1500)
	}
	for read := 0; read < n; {
		k, err := server.(*rdmanet.PacketConn).ReadBatch(got) // those that are there
		if err != nil {
			log.Fatal(err)
		}
		for _, d := range got[:k] {
			fmt.Printf("%s\n", d.Buf[:d.N])
		}
		read += k
	}
	// Output:
	// wrote 3
	// one
	// two
	// three
}

// A group is joined by an interface, here the one that every machine has. To hear what it
// sends itself it has to say so.
func ExampleListenMulticast() {
	lo, err := loopback()
	if err != nil {
		log.Fatal(err)
	}
	group := &net.UDPAddr{IP: net.IPv4(239, 1, 2, 3), Port: 7777}
	p, err := rdmanet.ListenMulticast("udp4", lo, group)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	if err := p.SetMulticastLoopback(true); err != nil {
		log.Fatal(err)
	}
	if _, err := p.WriteTo([]byte("to whom it may concern"), group); err != nil {
		log.Fatal(err)
	}
	buf := make([]byte, 1500)
	n, from, err := p.ReadFrom(buf)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, from port %d\n", buf[:n], from.(*net.UDPAddr).Port)
	// Output:
	// to whom it may concern, from port 7777
}

func loopback() (*net.Interface, error) {
	ifis, err := net.Interfaces()
	for _, ifi := range ifis {
		if ifi.Flags&net.FlagLoopback != 0 {
			return &ifi, nil
		}
	}
	return nil, err
}
