// Command echo is the smallest example: the server sends back what it receives.
package main

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

func main() {
	demo.Main(demo.Program{Serve: serve, Client: client})
}

// serve works on any listener, such as that of rdmanet.Listen("rdma", ":7777").
func serve(ln net.Listener) error {
	demo.Ready(ln.Addr().String())
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			io.Copy(conn, conn)
		}()
	}
}

func client(ctx context.Context, dial demo.DialFunc, addr string) (string, error) {
	conn, err := dial(ctx, addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return ask(conn, "hello over a queue pair")
}

// ask works on any connection, such as that of rdmanet.Dial("rdma", addr).
func ask(conn net.Conn, question string) (string, error) {
	if _, err := io.WriteString(conn, question); err != nil {
		return "", err
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	if err == nil && string(answer) != question {
		err = fmt.Errorf("%w: said %q, heard %q", demo.ErrDiffers, question, answer)
	}
	return fmt.Sprintf("%q came back", answer), err
}
